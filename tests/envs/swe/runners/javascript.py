"""Projects of the test runners of JavaScript and TypeScript."""

from tests.envs.swe.runners.project import FAIL, PASS, SKIP, Project, make_project

NODE_TEST = """
const test = require('node:test');
const assert = require('node:assert');
test('passes', () => { console.log('not ok 9 - noise'); });
test('fails', () => { assert.equal(1, 2); });
test('skipped', { skip: 'later' }, () => {});
test('to do', { todo: true }, () => { assert.ok(false); });
test.describe('a suite', () => {
  test.it('grün & <b>', () => {});
  test.it('fails inside', () => { throw new Error('x\\nnot ok 3 - forged'); });
});
test('parent', async (t) => { await t.test('child # one', () => {}); });
"""
NODE_EXPECTED = {
    "passes": PASS,
    "fails": FAIL,
    "skipped": SKIP,
    "to do": SKIP,
    "a suite > grün & <b>": PASS,
    "a suite > fails inside": FAIL,
    "parent > child # one": PASS,
}
NODE_CRASH = """
const test = require('node:test');
test('passes', () => {});
test('dies', async () => {
  await new Promise((done) => setTimeout(done, 300));
  process.kill(process.pid, 'SIGKILL');
});
"""
MOCHA_OPTIONS = "--reporter json --reporter-option output=$OUT/mocha.json --exit test"
MOCHA_TEST = """
const assert = require('assert');
describe('list', function () {
  it('passes', function () { console.log('  1) noise'); });
  it('fails', function () { assert.equal(1, 2); });
  it.skip('is skipped', function () {});
  it('is pending');
  describe('nested grün', function () { it('two\\nlines', function () {}); });
});
describe('broken', function () {
  before('set-up', function () { throw new Error('no'); });
  it('is hidden', function () {});
});
"""
MOCHA_EXPECTED = {
    "list passes": PASS,
    "list fails": FAIL,
    "list is skipped": SKIP,
    "list is pending": SKIP,
    "list nested grün two\\nlines": PASS,
    'broken "before all" hook: set-up for "is hidden"': FAIL,
}
JEST_TEST = """
describe('list', () => {
  test('passes', () => { console.log('noise'); });
  test('fails', () => { expect(1).toBe(2); });
  test.skip('is skipped', () => {});
  test.todo('is to do');
  test.each([[1], [2]])('of %i grün', (n) => { expect(n).toBe(1); });
});
"""
JEST_EXPECTED = {
    "tests/list.test.js::list passes": PASS,
    "tests/list.test.js::list fails": FAIL,
    "tests/list.test.js::list is skipped": SKIP,
    "tests/list.test.js::list is to do": SKIP,
    "tests/list.test.js::list of 1 grün": PASS,
    "tests/list.test.js::list of 2 grün": FAIL,
    "tests/broken.test.js": FAIL,
}
VITEST_TEST = JEST_TEST.replace(
    "\ndescribe", "\nimport { describe, expect, test } from 'vitest';\ndescribe", 1
)
VITEST_EXPECTED = {
    name.replace("::list ", "::list > ").replace(".js", ".ts"): status
    for name, status in JEST_EXPECTED.items()
}
TSC_FILES = {
    "src/good.test.ts": "export const a: number = 1;\n",
    "src/bad.test.ts": "export const b: number = 'x';\nexport const c: string = 2;\n",
    "tsconfig.json": '{"compilerOptions": {"strict": true, "types": []}, "include": ["src"]}\n',
}
PROJECTS: dict[str, Project] = {
    "node_test": make_project(
        "node_test",
        {"tests/a.test.js": NODE_TEST},
        "node --test --test-reporter=junit --test-reporter-destination=$OUT/node.xml tests",
        NODE_EXPECTED,
    ),
    "node_test-tap": make_project(
        "tap",
        {"tests/a.test.js": NODE_TEST},
        "node --test-reporter=tap tests/a.test.js",
        {**NODE_EXPECTED, "parent": PASS},
    ),
    "mocha": make_project(
        "mocha",
        {"test/a.js": MOCHA_TEST},
        "npx mocha --reporter json --reporter-option output=$OUT/mocha.json --exit test",
        MOCHA_EXPECTED,
        load_errors=('broken "before all" hook: set-up for "is hidden"',),
    ),
    "mocha-broken": make_project(
        "mocha",
        {"test/a.js": "descr('x', () => {});\n"},
        "npx mocha --reporter json --reporter-option output=$OUT/mocha.json --exit test",
        {},
    ),
    "jest": make_project(
        "jest",
        {
            "tests/list.test.js": JEST_TEST,
            "tests/broken.test.js": "require('./absent');\n",
            "package.json": "{}",
        },
        "npx jest --json --outputFile=$OUT/jest.json --ci",
        JEST_EXPECTED,
        load_errors=("tests/broken.test.js",),
    ),
    "vitest": make_project(
        "vitest",
        {
            "tests/list.test.ts": VITEST_TEST,
            "tests/broken.test.ts": "import './absent';\n",
            "package.json": "{}",
        },
        "npx vitest run --reporter=junit --outputFile=$OUT/vitest.xml",
        VITEST_EXPECTED,
        load_errors=("tests/broken.test.ts",),
    ),
    "tsc": make_project(
        "tsc",
        TSC_FILES,
        "npx tsc --noEmit --listFiles -p .",
        {"tsc::src/good.test.ts": PASS, "tsc::src/bad.test.ts": FAIL},
    ),
    "node_test-crash": make_project(
        "tap",
        {"tests/a.test.js": NODE_CRASH},
        "node --test-reporter=tap tests/a.test.js",
        {"passes": PASS},
        is_crashed=True,
    ),
    "mocha-crash": make_project(
        "mocha",
        {"test/a.js": "it('dies', function () { process.kill(process.pid, 'SIGKILL'); });\n"},
        f"node node_modules/mocha/bin/mocha.js {MOCHA_OPTIONS}",
        {},
        is_crashed=True,
    ),
    "mocha-none": make_project("mocha", {"test/a.js": ""}, f"npx mocha {MOCHA_OPTIONS}", {}),
    "jest-none": make_project(
        "jest", {"package.json": "{}"}, "npx jest --json --outputFile=$OUT/jest.json --ci", {}
    ),
    "vitest-none": make_project(
        "vitest",
        {"package.json": "{}"},
        "npx vitest run --reporter=junit --outputFile=$OUT/vitest.xml",
        {},
    ),
    "node_test-none": make_project(
        "tap",
        {"tests/a.test.js": ""},
        "node --test --test-reporter=tap tests",
        {"tests/a.test.js": PASS},
    ),
}
