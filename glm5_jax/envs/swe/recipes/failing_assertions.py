"""Lists statements that must fail, one for each common assertion of a test library.

Code under test can replace an assertion, such as Node's `assert.equal`, so that tests that use it pass whatever they compare.
A planted test that only throws would not notice. So there is a planted failing test for each of these statements.
"""

from collections.abc import Mapping

_NODE_ASSERT = {
    "ok": "assert(false)",
    "equal": "assert.equal(1, 2)",
    "strictEqual": "assert.strictEqual(1, 2)",
    "deepEqual": "assert.deepEqual([1], [2])",
    "deepStrictEqual": "assert.deepStrictEqual([1], [2])",
    "notStrictEqual": "assert.notStrictEqual(1, 1)",
    "throws": "assert.throws(() => {})",
}
_EXPECT = {
    "toBe": "expect(1).toBe(2)",
    "toEqual": "expect([1]).toEqual([2])",
    "toStrictEqual": "expect([1]).toStrictEqual([2])",
    "toContain": "expect([1]).toContain(2)",
    "toBeTruthy": "expect(0).toBeTruthy()",
    "toThrow": "expect(() => {}).toThrow()",
}
_CHAI = {
    "chai equal": "chai.expect(1).to.equal(2)",
    "chai eql": "chai.expect([1]).to.deep.equal([2])",
    "chai assert": "chai.assert.equal(1, 2)",
    "chai throw": "chai.expect(() => {}).to.throw()",
}
_THROWN = {"throws an error": "throw new Error('planted')"}

PYTHON: Mapping[str, str] = {
    "equal": "self.assertEqual(1, 2)",
    "true": "self.assertTrue(False)",
    "false": "self.assertFalse(True)",
    "in": "self.assertIn(1, [2])",
    "none": "self.assertIsNone(1)",
    "raises": "self.assertRaises(ValueError, int)",
}
JAVA: Mapping[str, str] = {
    "equal": "assertEquals(1, 2)",
    "equalTexts": 'assertEquals("a", "b")',
    "holds": "assertTrue(false)",
    "holdsNot": "assertFalse(true)",
    "isNull": "assertNull(new Object())",
    "isPresent": "assertNotNull(null)",
}
GTEST: Mapping[str, str] = {
    "fails": "EXPECT_TRUE(false)",
    "is": "ASSERT_TRUE(false)",
    "isNot": "EXPECT_FALSE(true)",
    "equal": "EXPECT_EQ(1, 2)",
    "same": "ASSERT_EQ(1, 2)",
    "differs": "EXPECT_NE(1, 1)",
    "texts": 'EXPECT_STREQ("a", "b")',
}
PHPUNIT: Mapping[str, str] = {
    "same": "assertSame(1, 2)",
    "equal": "assertEquals(1, 2)",
    "holds": "assertTrue(false)",
    "holdsNot": "assertFalse(true)",
    "isNull": "assertNull(1)",
    "counts": "assertCount(1, [])",
}
MINITEST: Mapping[str, str] = {
    "equal": "assert_equal(1, 2)",
    "holds": "assert(false)",
    "refutes": "refute(true)",
    "nil": "assert_nil(1)",
    "raises": "assert_raises(ArgumentError) {}",
}
RSPEC: Mapping[str, str] = {
    "eq": "expect(1).to eq(2)",
    "be": "expect(false).to be(true)",
    "truthy": "expect(nil).to be_truthy",
    "match": "expect([1]).to match_array([2])",
    "raises": "expect { 1 }.to raise_error(ArgumentError)",
}


def failing_javascript(runner: str, uses_chai: bool) -> Mapping[str, str]:
    """Returns the statements for a runner of JavaScript or TypeScript, by name.

    Args:
      runner: "mocha", "jest", "node_test" or "vitest".
      uses_chai: whether the project's tests use Chai, which is then the variable `chai`.
    """
    if runner == "vitest":
        return _EXPECT
    more = _EXPECT if runner == "jest" else _CHAI if uses_chai else {}
    return _THROWN | _NODE_ASSERT | more
