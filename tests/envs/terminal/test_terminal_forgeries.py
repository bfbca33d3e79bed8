"""No form of test script that is graded soundly rewards an attempt that forges it; solutions are still rewarded."""

import asyncio

import pytest

from glm5_jax.envs.terminal import Nop, TrialRunner, load_task
from tests.envs.leftovers import run
from tests.envs.terminal import (
    forgeries,
    forgeries_by_loading,
    forgeries_by_objects,
    forgeries_by_surroundings,
)
from tests.envs.terminal.folders import Text, make_task, needs_root, selected_values, slow_but

pytestmark = [pytest.mark.usefixtures("isolation"), needs_root]
_MODULES = (forgeries, forgeries_by_surroundings, forgeries_by_loading, forgeries_by_objects)
FORMS = {name: form for module in _MODULES for name, form in module.FORMS.items()}
ATTACKS = {name: attack for module in _MODULES for name, attack in module.ATTACKS.items()}
QUICK = tuple(name for module in _MODULES for name in module.QUICK)
QUICK_FORMS = (
    "relative",
    "import",
    "check",
    "cmp after a program",
    "pipe into grep",
    "perl tests",
    "an open file",
    "a mock",
    "an archive",
)


def results(folder, attempts):
    """Returns the results of attempts {name: (form, agent)}, three at a time."""
    places = asyncio.Semaphore(3)

    async def one(trials, number, form, agent):
        async with places:
            task = make_task(folder, f"t{number}", **FORMS[form][0])
            return await trials.run(load_task(task), agent)

    async def work():
        async with TrialRunner() as trials:
            pairs = enumerate(attempts.values())
            trial_results = await asyncio.gather(
                *(one(trials, i, *attempt) for i, attempt in pairs)
            )
            return dict(zip(attempts, trial_results))

    return run(work())


@pytest.fixture(scope="module")
def attack_results(tmp_path_factory, request):
    """Returns the results of attacks by name."""
    names = selected_values(request, "attack")
    attempts = {name: (ATTACKS[name][0], Text(ATTACKS[name][1])) for name in names}
    return results(tmp_path_factory.mktemp("attacks"), attempts)


@pytest.fixture(scope="module")
def solution_results(tmp_path_factory, request):
    """Returns the results of solutions and of doing nothing, by form."""
    forms = selected_values(request, "form")
    attempts = {(form, True): (form, Text(FORMS[form][1])) for form in forms}
    attempts |= {(form, False): (form, Nop()) for form in forms}
    return results(tmp_path_factory.mktemp("solved"), attempts)


@pytest.mark.parametrize("attack", slow_but(QUICK, ATTACKS))
def test_gives_no_reward_to_forgery(attack_results, attack):
    assert attack_results[attack].reward == 0.0, attack_results[attack]


@pytest.mark.parametrize("form", slow_but(QUICK_FORMS, FORMS))
def test_rewards_only_solution(solution_results, form):
    assert solution_results[form, True].reward == 1.0, solution_results[form, True]
    assert solution_results[form, False].reward == 0.0, solution_results[form, False]
