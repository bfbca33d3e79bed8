"""Provides a parser for the output of each test runner, by the runner's name.

report = PARSERS["pytest"](RunOutput(log=log, reports={"junit.xml": data}, exit_code=1))

Parsers read machine-readable reports first. The text of the log is used where there is no report, as after a crash.
Each parser compares its results with the runner's own totals, and raises `ReportError` if they differ.
"""

from collections.abc import Mapping

from glm5_jax.envs.swe.parsers import c, cpp, golang, java, javascript, php, python, ruby, tap
from glm5_jax.envs.swe.parsers.report import (
    CaseResult,
    ReportError,
    ReportParser,
    RunOutput,
    RunReport,
    RunTotals,
    Status,
    exit_code_problem,
)

PARSERS: Mapping[str, ReportParser] = {
    "automake": c.parse_automake,
    "catch2": cpp.parse_catch2,
    "check": c.parse_check,
    "cmocka": c.parse_cmocka,
    "ctest": cpp.parse_ctest,
    "doctest": cpp.parse_catch2,
    "go": golang.parse_go,
    "gradle": java.parse_surefire,
    "gtest": cpp.parse_gtest,
    "jest": javascript.parse_jest,
    "junit5": java.parse_junit5,
    "minitest": ruby.parse_minitest,
    "mocha": javascript.parse_mocha,
    "node_test": javascript.parse_node_test,
    "phpunit": php.parse_phpunit,
    "pytest": python.parse_pytest,
    "rspec": ruby.parse_rspec,
    "surefire": java.parse_surefire,
    "tap": tap.parse_tap,
    "test_unit": ruby.parse_test_unit,
    "tsc": javascript.parse_tsc,
    "unittest": python.parse_unittest,
    "unity": c.parse_unity,
    "vitest": javascript.parse_vitest,
}


def find_parser(name: str) -> ReportParser:
    """Returns a built-in parser. Raises ValueError if there is none of this name."""
    if name not in PARSERS:
        raise ValueError(f"log_parser is {name!r}; use one of {', '.join(PARSERS)}, or generated")
    return PARSERS[name]


__all__ = [
    "PARSERS",
    "CaseResult",
    "ReportParser",
    "ReportError",
    "RunOutput",
    "RunReport",
    "Status",
    "RunTotals",
    "exit_code_problem",
    "find_parser",
]
