"""Projects of the test runners of Java."""

from tests.envs.swe.runners.project import FAIL, PASS, SKIP, Project, make_project

JUNIT5_TEST = """package small;

import static org.junit.jupiter.api.Assertions.*;
import org.junit.jupiter.api.*;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

class MixedTest {
  @Test void passes() {}
  @Test void fails() { assertEquals(1, 2); }
  @Test void errors() { throw new IllegalStateException("x"); }
  @Test @Disabled("later") void disabled() {}
  @ParameterizedTest @ValueSource(ints = {1, 2}) void below(int n) { assertTrue(n < 2); }
  @Nested class Inner { @Test void deep() {} }
}
"""
JUNIT5_EXPECTED = {
    "small.MixedTest::passes()": PASS,
    "small.MixedTest::fails()": FAIL,
    "small.MixedTest::errors()": FAIL,
    "small.MixedTest::disabled()": SKIP,
    "small.MixedTest::below(int)[1]": PASS,
    "small.MixedTest::below(int)[2]": FAIL,
    "small.MixedTest$Inner::deep()": PASS,
}
JAVA_PATH = ":".join(
    f"/usr/share/java/{name}.jar"
    for name in (
        "junit-jupiter-api junit-jupiter-engine junit-jupiter-params junit-platform-commons junit-platform-engine "
        "junit-platform-launcher junit-platform-console junit-platform-reporting opentest4j apiguardian-api "
        "univocity-parsers picocli"
    ).split()
)
JUNIT5 = (
    f"javac -nowarn -cp {JAVA_PATH} -d out MixedTest.java 2> /dev/null; java -cp out:{JAVA_PATH} "
    "org.junit.platform.console.ConsoleLauncher --details=none --disable-banner --reports-dir=$OUT --scan-class-path=out"
)
SUREFIRE_POM = """<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>small</groupId><artifactId>small</artifactId><version>1</version>
  <properties>
    <maven.compiler.source>17</maven.compiler.source><maven.compiler.target>17</maven.compiler.target>
    <project.build.sourceEncoding>UTF-8</project.build.sourceEncoding>
  </properties>
  <dependencies>
    <dependency><groupId>junit</groupId><artifactId>junit</artifactId><version>4.x</version><scope>test</scope></dependency>
  </dependencies>
  <build><plugins>
    <plugin><artifactId>maven-compiler-plugin</artifactId><version>3.10.1</version></plugin>
    <plugin><artifactId>maven-resources-plugin</artifactId><version>3.3.0</version></plugin>
    <plugin><artifactId>maven-surefire-plugin</artifactId><version>2.22.3</version></plugin>
  </plugins></build>
</project>
"""
SUREFIRE_TEST = """package small;

import static org.junit.Assert.assertEquals;
import org.junit.*;

public class MixedTest {
  @Test public void passes() {}
  @Test public void fails() { assertEquals(1, 2); }
  @Test public void errors() { throw new IllegalStateException("x"); }
  @Test @Ignore("later") public void ignored() {}
}
"""
PROJECTS: dict[str, Project] = {
    "junit5": make_project("junit5", {"MixedTest.java": JUNIT5_TEST}, JUNIT5, JUNIT5_EXPECTED),
    "surefire": make_project(
        "surefire",
        {"pom.xml": SUREFIRE_POM, "src/test/java/small/MixedTest.java": SUREFIRE_TEST},
        "mvn -o -B -Dmaven.repo.local=/usr/share/maven-repo test; code=$?; cp target/surefire-reports/TEST-*.xml $OUT; "
        "exit $code",
        {
            "small.MixedTest::passes": PASS,
            "small.MixedTest::fails": FAIL,
            "small.MixedTest::errors": FAIL,
            "small.MixedTest::ignored": SKIP,
        },
    ),
}
