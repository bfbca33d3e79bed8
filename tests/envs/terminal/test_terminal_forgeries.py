"""No form of test script that is graded soundly gives a reward to an attempt that forges it; solutions still get theirs."""

import asyncio

import pytest

from glm5_jax.envs.terminal import Nop, TrialRunner, load_task
from tests.envs.leftovers import run
from tests.envs.terminal import forgeries, forgeries_by_surroundings
from tests.envs.terminal.folders import Text, needs_root, own, selected, slow_but

pytestmark = [pytest.mark.usefixtures("isolation"), needs_root]
FORMS = forgeries.FORMS | forgeries_by_surroundings.FORMS
ATTACKS = forgeries.ATTACKS | forgeries_by_surroundings.ATTACKS
QUICK = forgeries.QUICK + forgeries_by_surroundings.QUICK
QUICK_FORMS = ("relative", "import", "check", "cmp after a program", "pipe into grep", "perl tests")


def results(folder, attempts):
    """The results of attempts {name: (form, agent)}, three at a time."""
    places = asyncio.Semaphore(3)

    async def one(trials, number, form, agent):
        async with places:
            task = own(folder, f"t{number}", **FORMS[form][0])
            return await trials.run(load_task(task), agent)

    async def work():
        async with TrialRunner() as trials:
            pairs = enumerate(attempts.values())
            found = await asyncio.gather(*(one(trials, i, *attempt) for i, attempt in pairs))
            return dict(zip(attempts, found))

    return run(work())


@pytest.fixture(scope="module")
def attacked(tmp_path_factory, request):
    """The results of attacks by name."""
    names = selected(request, "attack")
    attempts = {name: (ATTACKS[name][0], Text(ATTACKS[name][1])) for name in names}
    return results(tmp_path_factory.mktemp("attacks"), attempts)


@pytest.fixture(scope="module")
def solved(tmp_path_factory, request):
    """The results of solutions and of doing nothing, by form."""
    forms = selected(request, "form")
    attempts = {(form, True): (form, Text(FORMS[form][1])) for form in forms}
    attempts |= {(form, False): (form, Nop()) for form in forms}
    return results(tmp_path_factory.mktemp("solved"), attempts)


@pytest.mark.parametrize("attack", slow_but(QUICK, ATTACKS))
def test_gives_no_reward_to_forgery(attacked, attack):
    assert attacked[attack].reward == 0.0, attacked[attack]


@pytest.mark.parametrize("form", slow_but(QUICK_FORMS, FORMS))
def test_rewards_solution_and_not_doing_nothing(solved, form):
    assert solved[form, True].reward == 1.0, solved[form, True]
    assert solved[form, False].reward == 0.0, solved[form, False]
