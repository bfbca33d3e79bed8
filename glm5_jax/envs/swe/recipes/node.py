"""Recipes for JavaScript with Mocha, Jest or node:test, and for TypeScript with Vitest; nothing is installed."""

import fnmatch
import json
import posixpath
import re
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax.envs.swe.file_tree import FileTree, TreeFile, text_file
from glm5_jax.envs.swe.recipes.failing_assertions import failing_javascript
from glm5_jax.envs.swe.recipes.plan import (
    RECIPE_FOLDER,
    RESULTS,
    SEED,
    WORKDIR,
    Canaries,
    ProjectPlan,
    RecipeError,
    first_focus,
    text_of,
)
from glm5_jax.envs.swe.recipes.planting import CanaryDraw
from glm5_jax.envs.swe.recipes.token_variants import plant_token_variants

_MODULES = "/tools/node/node_modules"
_LINK = TreeFile(stat.S_IFLNK | 0o777, _MODULES.encode())
_NAMES = ("*.test.*js", "*.spec.*js", "*-test.*js", "*_test.*js", "test-*.*js", "test_*.*js")
_IMPORTED = re.compile(r"""(?:from|import|import\(|require\()\s*['"]([^'".][^'"]*)['"]""")
_OTHER_TESTS = 8  # test files of TypeScript beside those in focus


class JavaScriptRecipe:
    """Recipe of JavaScript: the runner is the one that package.json names."""

    name = "javascript/1"
    language = "javascript"
    build_folders: tuple[str, ...] = ("coverage/",)

    def plan(self, tree: FileTree, focus: Sequence[str]) -> ProjectPlan:
        """Returns the commands of a project. Raises RecipeError if its runner is not supported."""
        runner, folder, pattern = _runner(tree), *_test_files(tree)
        depth = (
            "" if any("/" in p.removeprefix(f"{folder}/") for p in _tests(tree)) else "-maxdepth 1 "
        )
        find = (
            f"$(find {folder} {depth}-name '{pattern}' ! -path '*/node_modules/*' | LC_ALL=C sort"
        )
        mocha = (
            "node node_modules/mocha/bin/mocha.js --no-config --no-package -t 20000 --exit --reporter json "
            f"--reporter-option output={RESULTS}/mocha.json {find}"
        )
        jest = f"node node_modules/jest/bin/jest.js --ci --runInBand --json --outputFile={RESULTS}/jest.json"
        node = f"node --test --test-reporter=junit --test-reporter-destination={RESULTS}/node.xml {find}"
        commands = {
            # Mocha cannot shuffle, and in another order of files suites can have other names.
            "mocha": (f"{mocha})", f"{mocha})"),
            "jest": (jest, f"{jest} --randomize --seed={SEED}"),
            "node_test": (f"{node})", f"{node} -r)"),
        }[runner]
        return ProjectPlan(
            recipe=self.name,
            log_parser=runner,
            test_cmds=commands[:1],
            shuffled_cmds=commands[1:],
            files={"node_modules": _LINK},
            apt=("nodejs",),
            npm=(runner,) if runner != "node_test" else (),
            variables={"npm_config_offline": "true", "NODE_PATH": _MODULES},
        )

    def canaries(self, tree: FileTree, focus: Sequence[str], draw: CanaryDraw) -> Canaries:
        """Returns two test files next to the first one in focus."""
        near = first_focus(focus, _tests(tree), "JavaScript")
        _, pattern = _test_files(tree)
        runner, names = _runner(tree), (draw.word("a"), draw.word("z"))
        uses_chai = bool(re.search(r"""['"]chai['"]""", text_of(tree, near)))
        bodies = {"holds": ""}, failing_javascript(runner, uses_chai)
        files = {}
        for name, tests in zip(names, bodies):
            path = posixpath.join(posixpath.dirname(near), _named(pattern, name))
            is_module = path.endswith(".mjs") or _package(tree).get("type") == "module"
            is_module = is_module and not path.endswith(".cjs")
            head = _js_imports(runner, uses_chai, is_module)
            files[path] = text_file(head + _js_tests(runner, name, draw.statements(tests)))
        variants = plant_token_variants(tree, focus, "javascript", draw)
        return Canaries(
            files=files,
            passing=names[0],
            failing=names[1],
            variant_files=variants.files,
            variants=variants.names,
            swaps=variants.swaps,
        )


class TypeScriptRecipe:
    """Recipe of TypeScript with Vitest: a configuration of our own, the package's own name leads to its sources."""

    name = "typescript-vitest/1"
    language = "typescript"
    build_folders: tuple[str, ...] = ("coverage/", "dist/")

    def plan(self, tree: FileTree, focus: Sequence[str]) -> ProjectPlan:
        """Returns the commands of a project: the tests in focus, and some others whose imports are there."""
        tests = _typescript_tests(tree)
        if not tests:
            raise RecipeError("the project has no *.test.ts; leave it out")
        package = _package(tree)
        config = f"{RECIPE_FOLDER}/vitest.config.mjs"
        vitest = (
            f"node node_modules/vitest/vitest.mjs run --config {config} --configLoader native --reporter=junit "
            f"--outputFile={RESULTS}/vitest.xml $(cat {RECIPE_FOLDER}/*.txt)"
        )
        wanted = [path for path in focus if re.fullmatch(r".*\.test\.[cm]?tsx?", path)]
        others = [
            path for path in tests if path not in wanted and _has_known_imports(tree, path, package)
        ]
        listed = "".join(f"{path}\n" for path in [*wanted, *others[:_OTHER_TESTS]])
        return ProjectPlan(
            recipe=self.name,
            log_parser="vitest",
            test_cmds=(vitest,),
            shuffled_cmds=(f"{vitest} --sequence.shuffle.files --sequence.seed={SEED}",),
            files={
                "node_modules": _LINK,
                config: text_file(_vitest_config(package)),
                f"{RECIPE_FOLDER}/tests.txt": text_file(listed),
            },
            apt=("nodejs",),
            npm=("vitest",),
            variables={"npm_config_offline": "true"},
        )

    def canaries(self, tree: FileTree, focus: Sequence[str], draw: CanaryDraw) -> Canaries:
        """Returns two test files next to the first one in focus."""
        near = first_focus(focus, _typescript_tests(tree), "TypeScript")
        names = draw.word("a"), draw.word("z")
        bodies = {"toBe": "expect(1).toBe(1)"}, failing_javascript("vitest", uses_chai=False)
        head = "import { expect, test } from 'vitest';\n"
        files = {
            posixpath.join(posixpath.dirname(near), f"{name}.test.ts"): text_file(
                head
                + "".join(
                    f"test('{name} {k}', () => {{ {v}; }});\n"
                    for k, v in draw.statements(tests).items()
                )
            )
            for name, tests in zip(names, bodies)
        }
        listed = "".join(f"{path}\n" for path in files)
        files[f"{RECIPE_FOLDER}/{draw.word()}.txt"] = text_file(listed)
        variants = plant_token_variants(tree, focus, "typescript", draw)
        return Canaries(
            files=files,
            passing=names[0],
            failing=names[1],
            variant_files=variants.files,
            variants=variants.names,
            swaps=variants.swaps,
        )


def _package(tree: FileTree) -> dict[str, Any]:
    try:
        value = json.loads(text_of(tree, "package.json"))
    except ValueError as error:
        raise RecipeError(f"package.json cannot be read: {error}; leave the project out") from None
    return value if isinstance(value, dict) else {}


def _runner(tree: FileTree) -> str:
    package = _package(tree)
    script = str((package.get("scripts") or {}).get("test", ""))
    names = {**(package.get("devDependencies") or {}), **(package.get("dependencies") or {})}
    if "node --test" in script:
        return "node_test"
    for runner in ("mocha", "jest"):
        if runner in script or runner in names:
            return runner
    raise RecipeError(f"the test script {script!r:.80} uses none of mocha, jest and node --test")


def _tests(tree: FileTree) -> list[str]:
    """Returns the test files, which the runner's pattern in package.json selects if there is one."""
    folder, pattern = _test_files(tree)
    return [
        path
        for path in tree
        if path.startswith(f"{folder}/") and fnmatch.fnmatch(posixpath.basename(path), pattern)
    ]


def _test_files(tree: FileTree) -> tuple[str, str]:
    """Returns the folder of the tests and the pattern of their names."""
    script = str((_package(tree).get("scripts") or {}).get("test", ""))
    if match := re.search(r"(?<![\w/.])([\w-]+)/(?:\*\*/)?(\S*\*\S*\.[cm]?js)", script):
        return match[1], match[2].strip("'\"")
    for folder in ("test", "tests", "spec", "__tests__"):
        names = [posixpath.basename(path) for path in tree if path.startswith(f"{folder}/")]
        for pattern in _NAMES:
            if any(fnmatch.fnmatch(name, pattern) for name in names):
                return folder, pattern
        if any(name.endswith(".js") for name in names):
            return folder, "*.js"
    raise RecipeError("the project has no folder of tests; leave it out")


def _named(pattern: str, word: str) -> str:
    head, *rest = re.split(r"\*+", pattern)
    return head + word + "".join(rest)


def _js_imports(runner: str, uses_chai: bool, is_module: bool) -> str:
    """Returns the lines that load what planted tests use."""
    modules = {"assert": "node:assert"}
    modules |= {"test": "node:test"} if runner == "node_test" else {}
    modules |= {"chai": "chai"} if uses_chai else {}
    if is_module:
        return "".join(
            f"import {'* as ' * (name == 'chai')}{name} from '{module}';\n"
            for name, module in modules.items()
        )
    return "".join(f"const {name} = require('{module}');\n" for name, module in modules.items())


def _js_tests(runner: str, word: str, tests: Mapping[str, str]) -> str:
    """Returns a test for each body, under a common word."""
    if runner == "node_test":
        return "".join(
            f"test('{word} {name}', function () {{ {body} }});\n" for name, body in tests.items()
        )
    lines = "".join(f"  it('{name}', function () {{ {body} }});\n" for name, body in tests.items())
    return f"describe('{word}', function () {{\n{lines}}});\n"


def _typescript_tests(tree: FileTree) -> list[str]:
    return sorted(path for path in tree if re.fullmatch(r".*\.test\.[cm]?tsx?", path))


def _has_known_imports(tree: FileTree, path: str, package: Mapping[str, Any]) -> bool:
    """Returns whether a test imports nothing but Vitest, Node's modules and the package."""
    known = {"vitest", str(package.get("name", ""))}
    names = _IMPORTED.findall(text_of(tree, path))
    return all(name.startswith("node:") or name.split("/")[0] in known for name in names)


def _vitest_config(package: Mapping[str, Any]) -> str:
    """Returns a configuration in which each entry of the package's exports leads to its TypeScript source."""
    name = str(package.get("name", ""))
    aliases = []
    exports = package.get("exports")
    for key, value in exports.items() if isinstance(exports, dict) else ():
        targets = value.values() if isinstance(value, dict) else [value]
        source = next((t for t in targets if isinstance(t, str) and t.startswith("./src/")), None)
        if source and name and "*" not in key:
            entry = re.escape(name + key.removeprefix("."))
            target = f"{WORKDIR}/{source.removeprefix('./')}"
            aliases.append(
                f"{{ find: /^{entry.replace('/', chr(92) + '/')}$/, replacement: {json.dumps(target)} }}"
            )
    return (
        f"export default {{\n  root: {json.dumps(WORKDIR)},\n  cacheDir: '/tmp/home/vite',\n"
        f"  resolve: {{ alias: [\n    {(',' + chr(10) + '    ').join(aliases)}\n  ] }},\n"
        "  test: { include: ['**/*.test.{ts,tsx,mts,cts}'], exclude: ['node_modules/**'], pool: 'forks',\n"
        "    poolOptions: { forks: { maxForks: 2 } }, testTimeout: 60000, watch: false },\n};\n"
    )
