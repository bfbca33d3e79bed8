"""Recipe for Java projects with JUnit 4 or 5: javac and JUnit's console launcher, with Debian's jars."""

import functools
import pathlib
import posixpath
import re
import zipfile
from collections.abc import Sequence

from glm5_jax.envs.swe.file_tree import FileTree, text_file
from glm5_jax.envs.swe.recipes.failing_assertions import JAVA
from glm5_jax.envs.swe.recipes.plan import (
    RECIPE_FOLDER,
    RESULTS,
    SEED,
    Canaries,
    ProjectPlan,
    RecipeError,
    first_focus,
    matching,
    text_of,
)
from glm5_jax.envs.swe.recipes.planting import CanaryDraw
from glm5_jax.envs.swe.recipes.token_variants import plant_token_variants

_JARS = pathlib.Path("/usr/share/java")
_ALWAYS = (
    "junit-jupiter-api",
    "junit-jupiter-engine",
    "junit-jupiter-params",
    "junit-vintage-engine",
    "junit-platform-commons",
    "junit-platform-console",
    "junit-platform-engine",
    "junit-platform-launcher",
    "junit-platform-reporting",
    "opentest4j",
    "apiguardian-api",
    "univocity-parsers",
    "picocli",
    "junit4",
    "hamcrest",
    "hamcrest-all",
    "hamcrest-core",
    "hamcrest-library",
)
_IMPORT = re.compile(r"^import (?:static )?([\w.]+)", re.MULTILINE)
_PARENT = re.compile(r"<parent>.*?</parent>", re.DOTALL)
_ARTIFACT = re.compile(r"<artifactId>([\w.-]+)</artifactId>")
_OTHER_TESTS = 5  # test classes beside those in focus
_TEST_NAMES = ("*Test.java", "*Tests.java")
_OUT = ".out"


class JavaRecipe:
    """Recipe of Java with sources in src/main/java and src/test/java.

    Only the test classes in focus and a few others are compiled, since others may need what Debian lacks.
    """

    name = "java-junit/1"
    language = "java"
    build_folders: tuple[str, ...] = (f"{_OUT}/", "target/")

    def plan(self, tree: FileTree, focus: Sequence[str]) -> ProjectPlan:
        """Returns the commands of a project. Raises RecipeError for another layout."""
        if not any(path.startswith("src/main/java/") for path in tree):
            raise RecipeError("there is no src/main/java; leave the project out")
        jars = _class_path(text_of(tree, "pom.xml"))
        wanted = [path for path in focus if path.endswith(".java")]
        wanted += _other_tests(tree, wanted, jars)
        java = (
            f"java -Xmx1g -XX:ActiveProcessorCount=2 -cp {_OUT}/test:{_OUT}/main:src/test/resources:$JARS "
            "org.junit.platform.console.ConsoleLauncher --details=none --disable-banner "
            f"--reports-dir={RESULTS} --scan-class-path={_OUT}/test"
        )
        order = (
            " --config 'junit.jupiter.testmethod.order.default=org.junit.jupiter.api.MethodOrderer$Random'"
            f" --config junit.jupiter.execution.order.random.seed={SEED}"
        )
        javac = "javac -J-Xmx1g -nowarn -proc:none -encoding UTF-8"
        listed = f"$(cat {RECIPE_FOLDER}/*.txt | while read f; do [ -f $f ] && echo $f; done)"
        build = (
            f"rm -rf {_OUT} && mkdir -p {_OUT}/main {_OUT}/test",
            f"{javac} -d {_OUT}/main -cp $JARS $(find src/main/java -name '*.java' ! -name module-info.java)",
            f"[ ! -d src/main/resources ] || cp -r src/main/resources/. {_OUT}/main/",
            f"{javac} -d {_OUT}/test -sourcepath src/test/java -cp {_OUT}/main:$JARS {listed}",
        )
        return ProjectPlan(
            recipe=self.name,
            log_parser="junit5",
            test_cmds=(java,),
            shuffled_cmds=(java + order,),
            setup_cmds=build,
            rebuild_cmds=build,
            variables={"JARS": ":".join(jars)},
            files={f"{RECIPE_FOLDER}/tests.txt": text_file("".join(f"{p}\n" for p in wanted))},
            apt=("openjdk-17-jdk-headless", "junit5", "junit4"),
            per_test_cmd=f"{java} --include-classname '{{name}}'",
        )

    def canaries(self, tree: FileTree, focus: Sequence[str], draw: CanaryDraw) -> Canaries:
        """Returns two test classes in the package of the first one in focus."""
        near = first_focus(focus, matching(tree, *_TEST_NAMES), "Java")
        folder, text = posixpath.dirname(near), text_of(tree, near)
        package = re.search(r"^package [\w.]+;", text, re.MULTILINE)
        annotation = "org.junit.jupiter.api" if "org.junit.jupiter" in text else "org.junit"
        names = f"{draw.word('a').capitalize()}Test", f"{draw.word('z').capitalize()}Test"
        asserts = f"{annotation}.Assertions" if "jupiter" in annotation else f"{annotation}.Assert"
        bodies = ({"holds": "assertTrue(true)"}, JAVA)
        files = {}
        for name, tests in zip(names, bodies):
            methods = "".join(
                f"    @{annotation}.Test\n    public void {test}() {{ {asserts}.{body}; }}\n"
                for test, body in draw.statements(tests).items()
            )
            source = f"{package[0] if package else ''}\npublic class {name} {{\n{methods}}}\n"
            files[posixpath.join(folder, f"{name}.java")] = text_file(source)
        listed = "".join(f"{path}\n" for path in files)
        files[f"{RECIPE_FOLDER}/{draw.word()}.txt"] = text_file(listed)
        variants = plant_token_variants(tree, focus, "java", draw)
        return Canaries(
            files=files,
            passing=names[0],
            failing=names[1],
            variant_files=variants.files,
            variants=variants.names,
            swaps=variants.swaps,
        )


def _class_path(pom: str) -> tuple[str, ...]:
    """Returns Debian's jars for JUnit and for the artifacts that a pom names, but not of the project itself."""
    project = _ARTIFACT.search(_PARENT.sub("", pom))
    names = dict.fromkeys([*_ALWAYS, *_ARTIFACT.findall(pom)])
    # Debian's version of the project may hold the fix.
    jars = [_JARS / f"{name}.jar" for name in names if project is None or name != project[1]]
    return tuple(str(jar) for jar in jars if jar.exists())


def _other_tests(tree: FileTree, wanted: Sequence[str], jars: tuple[str, ...]) -> list[str]:
    """Returns test classes of the project whose imports are all there."""
    packages = {re.sub(r"^src/(?:main|test)/java/", "", posixpath.dirname(path)).replace("/", ".") for path in tree if path.endswith(".java")}  # fmt: skip
    packages |= _jar_packages(jars)
    others = []
    for path in matching(tree, *_TEST_NAMES):
        imports = _IMPORT.findall(text_of(tree, path))
        if path not in wanted and all(_is_known(name, packages) for name in imports):
            others.append(path)
    return others[:_OTHER_TESTS]


def _is_known(name: str, packages: set[str]) -> bool:
    if name.startswith(("java.", "javax.")):
        return True
    parts = name.split(".")
    return any(".".join(parts[:n]) in packages for n in range(len(parts), 1, -1))


@functools.cache
def _jar_packages(jars: tuple[str, ...]) -> frozenset[str]:
    names: set[str] = set()
    for jar in jars:
        with zipfile.ZipFile(jar) as archive:
            names |= {posixpath.dirname(n).replace("/", ".") for n in archive.namelist() if n.endswith(".class")}  # fmt: skip
    return frozenset(names)
