"""Recipe for PHP projects with PHPUnit, with Debian's packages of the requirements and no Composer."""

import json
import pathlib
import posixpath
from collections.abc import Mapping, Sequence

from glm5_jax.envs.swe.file_tree import FileTree, text_file
from glm5_jax.envs.swe.recipes.failing_assertions import PHPUNIT
from glm5_jax.envs.swe.recipes.plan import (
    RECIPE_FOLDER,
    RESULTS,
    SEED,
    WORKDIR,
    Canaries,
    ProjectPlan,
    RecipeError,
    first_focus,
    matching,
    text_of,
)
from glm5_jax.envs.swe.recipes.planting import CanaryDraw
from glm5_jax.envs.swe.recipes.token_variants import plant_token_variants

_DPKG_LISTS = pathlib.Path("/var/lib/dpkg/info")
_DEBIAN_CLASSES = "/usr/share/php"
_AUTOLOAD = """<?php
$maps = %s;
spl_autoload_register(function ($class) use ($maps) {
    foreach ($maps as [$prefix, $folder]) {
        if ($prefix === '' || strncmp($class, $prefix, strlen($prefix)) === 0) {
            $file = $folder . '/' . str_replace('\\\\', '/', substr($class, strlen($prefix))) . '.php';
            if (is_file($file)) {
                require_once $file;
                return;
            }
        }
    }
});
"""


class PhpRecipe:
    """Recipe of PHP: an autoloader of the project's PSR-4 maps, PHPUnit without the project's configuration."""

    name = "php-phpunit/1"
    language = "php"
    build_folders: tuple[str, ...] = ("vendor/",)

    def plan(self, tree: FileTree, focus: Sequence[str]) -> ProjectPlan:
        """Returns the commands of a project. Raises RecipeError without a composer.json or tests."""
        try:
            composer = json.loads(text_of(tree, "composer.json"))
        except ValueError as error:
            raise RecipeError(
                f"composer.json cannot be read: {error}; leave the project out"
            ) from None
        tests = matching(tree, "*Test.php")
        if not tests:
            raise RecipeError("the project has no *Test.php; leave it out")
        packages, loaders = _requirements(composer.get("require", {}))
        root = tests[0].partition("/")[0]
        bootstrap = f"{RECIPE_FOLDER}/autoload.php"
        phpunit = (
            f"phpunit --no-configuration --bootstrap {bootstrap} --log-junit {RESULTS}/phpunit.xml "
            "--do-not-cache-result"
        )
        return ProjectPlan(
            recipe=self.name,
            log_parser="phpunit",
            test_cmds=(f"{phpunit} {root}",),
            shuffled_cmds=(f"{phpunit} --order-by=random --random-order-seed={SEED} {root}",),
            files={bootstrap: text_file(_autoloader(composer, loaders))},
            apt=("php-cli", "php-xml", "php-mbstring", "phpunit", *packages),
            per_test_cmd=f"phpunit --no-configuration --bootstrap {bootstrap} --filter {{name}} {root}",
        )

    def canaries(self, tree: FileTree, focus: Sequence[str], draw: CanaryDraw) -> Canaries:
        """Returns two test classes next to the first one in focus."""
        folder = posixpath.dirname(first_focus(focus, matching(tree, "*Test.php"), "PHP"))
        names = draw.word("a").capitalize(), draw.word("z").capitalize()
        text = "<?php\nfinal class {0}Test extends \\PHPUnit\\Framework\\TestCase\n{{\n{1}}}\n"
        method = "    public function test{0}(): void {{ $this->{1}; }}\n"
        bodies = (
            "".join(method.format(*test) for test in draw.statements(forms).items())
            for forms in ({"same": "assertSame(1, 1)"}, PHPUNIT)
        )
        files = {
            posixpath.join(folder, f"{name}Test.php"): text_file(text.format(name, body))
            for name, body in zip(names, bodies)
        }
        variants = plant_token_variants(tree, focus, "php", draw)
        return Canaries(
            files=files,
            passing=f"{names[0]}Test",
            failing=f"{names[1]}Test",
            variant_files=variants.files,
            variants=variants.names,
            swaps=variants.swaps,
        )


def _requirements(required: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Returns Debian's packages of requirements, and the autoloaders in them."""
    packages, loaders = [], []
    for requirement in required:
        vendor, slash, name = requirement.partition("/")
        if not slash:  # PHP and its extensions
            continue
        candidates = [f"php-{vendor}-{name}", f"php-{name}"]
        lists = [_DPKG_LISTS / f"{package}.list" for package in candidates]
        existing = [path for path in lists if path.exists()]
        # A package that is not installed is named by the check of packages.
        packages.append(existing[0].stem if existing else candidates[0])
        lines = existing[0].read_text().split("\n") if existing else []
        sources = [line for line in lines if line.endswith(".php")]
        with_loader = [line for line in sources if line.endswith("/autoload.php")]
        # A package of one file defines functions, which no autoloader finds.
        loaders += with_loader or (sources if len(sources) == 1 else [])
    return packages, loaders


def _autoloader(composer: Mapping, loaders: Sequence[str]) -> str:
    maps = []
    for section in ("autoload-dev", "autoload"):
        for prefix, folders in composer.get(section, {}).get("psr-4", {}).items():
            for folder in [folders] if isinstance(folders, str) else folders:
                maps.append([prefix, posixpath.normpath(f"{WORKDIR}/{folder}")])
    maps.append(["", _DEBIAN_CLASSES])
    pairs = ", ".join("[" + ", ".join(_quote(text) for text in pair) + "]" for pair in maps)
    files = [
        f"{WORKDIR}/{path}"
        for section in ("autoload", "autoload-dev")
        for path in composer.get(section, {}).get("files", [])
    ]
    lines = [f"require_once {_quote(path)};\n" for path in [*loaders, *files]]
    return _AUTOLOAD % f"[{pairs}]" + "".join(lines)


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
