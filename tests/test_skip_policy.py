"""The rules of skip_policy.py about skipped tests."""

from pathlib import Path

import pytest

pytest_plugins = "pytester"

RULES = Path(__file__).with_name("skip_policy.py")
MARKERS = "[pytest]\nmarkers =\n    docker\n    engine\n    gpu\n    stress\n"
ENGINE_SKIP = """
import pytest

@pytest.mark.engine
def test_engine():
    pytest.skip("no compiler")

def test_other():
    pytest.skip("not here")

@pytest.mark.docker
@pytest.mark.gpu
def test_gpu():
    pytest.skip("no GPU")

@pytest.mark.engine
@pytest.mark.xfail(reason="known")
def test_known():
    assert False
"""


@pytest.fixture
def run_with_rules(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(RULES.read_text(encoding="utf-8"))
    pytester.makeini(MARKERS)
    return pytester


@pytest.mark.parametrize(("ci", "failed", "skipped"), [("true", 1, 2), ("", 0, 3)])
def test_engine_tests_must_run_in_ci(
    run_with_rules: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    ci: str,
    failed: int,
    skipped: int,
) -> None:
    """A skipped engine test fails in CI and nowhere else; other skips, those of tests for a GPU
    among them, and xfails never fail."""
    monkeypatch.setenv("CI", ci)
    run_with_rules.makepyfile(ENGINE_SKIP)
    result = run_with_rules.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=failed, skipped=skipped, xfailed=1)


@pytest.mark.parametrize(
    "skip", ['pytest.skip("")', "pytest.skip()"], ids=["empty reason", "no reason"]
)
def test_a_skip_without_reason_fails(run_with_rules: pytest.Pytester, skip: str) -> None:
    """A test that skips without saying why is a failure."""
    run_with_rules.makepyfile(f"import pytest\n\ndef test_it():\n    {skip}\n")
    run_with_rules.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(failed=1)


def test_a_skip_mark_without_reason_fails(run_with_rules: pytest.Pytester) -> None:
    """A bare skip mark is a failure, too."""
    run_with_rules.makepyfile("import pytest\n\n@pytest.mark.skip\ndef test_it():\n    pass\n")
    run_with_rules.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(errors=1)


def test_a_module_must_not_skip_in_ci(
    run_with_rules: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that skips while it is collected fails in CI."""
    monkeypatch.setenv("CI", "true")
    run_with_rules.makepyfile("import pytest\n\npytest.importorskip('no_such_module')\n")
    run_with_rules.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(errors=1)


@pytest.mark.parametrize("suite", ["docker", "engine", "helm"])
def test_suites_that_ci_sets_up(
    run_with_rules: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, suite: str
) -> None:
    """A skipped test of a suite whose needs CI installs fails there."""
    monkeypatch.setenv("CI", "true")
    run_with_rules.makepyfile(
        f"import pytest\n\n@pytest.mark.{suite}\ndef test_it():\n    pytest.skip('not here')\n"
    )
    run_with_rules.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(failed=1)
