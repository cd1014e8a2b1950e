"""What a run of the tests says at its end, from the report that the rules for tests leave."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = "pytester"

TESTS = Path(__file__).parents[1]
SUMMARY = TESTS.parent / "ci" / "summary.py"
MARKERS = "[pytest]\nmarkers =\n    docker\n    engine\n    gpu\n    stress\n"
CASES = """
import pytest

@pytest.mark.engine
@pytest.mark.stress
def test_engine():
    pass

@pytest.mark.docker
@pytest.mark.parametrize("number", [1, 2])
def test_docker(number):
    assert number == 1

@pytest.mark.gpu
@pytest.mark.docker
def test_gpu():
    pytest.skip("no <GPU> & no driver")

@pytest.mark.stress
def test_stress():
    pass

@pytest.fixture
def broken():
    raise OSError("no space")

def test_rest(broken):
    pass

def test_no_fuse():
    pytest.skip("no FUSE")
"""
TABLE = """\
suite            ran   passed   failed  skipped
engine             1        1        0        0
docker             2        1        1        0
gpu                0        0        0        1
helm               0        0        0        0
stress             1        1        0        0
rest               1        0        1        1
all                5        3        2        2
skipped, gpu: no <GPU> & no driver
    test_cases::test_gpu
skipped, rest: no FUSE
    test_cases::test_no_fuse
"""


@pytest.fixture
def run_cases(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("CI", "true")
    pytester.makeconftest((TESTS / "skip_policy.py").read_text(encoding="utf-8"))
    pytester.makeini(MARKERS)
    return pytester


def summarize(report: Path) -> str:
    """The summary without the column of times."""
    ran = subprocess.run(
        [sys.executable, SUMMARY, report], capture_output=True, text=True, check=True
    )
    return re.sub(r" +(time|\d+ s)$", "", ran.stdout, flags=re.MULTILINE)


def test_every_test_counts_in_its_suite_and_every_skip_has_its_reason(
    run_cases: pytest.Pytester,
) -> None:
    """From a run with several workers the summary tells suites, outcomes and skips."""
    run_cases.makepyfile(test_cases=CASES)
    run_cases.runpytest_subprocess("-p", "no:cacheprovider", "-n", "2", "--junitxml=junit.xml")
    assert summarize(run_cases.path / "junit.xml") == TABLE


def test_a_file_that_could_not_be_read_is_counted(run_cases: pytest.Pytester) -> None:
    """A module that raises when it is imported is a failure of the collection."""
    run_cases.makepyfile(test_broken="raise RuntimeError('broken')")
    run_cases.runpytest_subprocess("-p", "no:cacheprovider", "--junitxml=junit.xml")
    lines = summarize(run_cases.path / "junit.xml").splitlines()
    assert "collection         1        0        1        0" in lines


def test_times_add_up(tmp_path: Path) -> None:
    """Many short tests take together what they take, and not nothing."""
    case = '<testcase name="t" time="0.4"><properties><property name="suite" value="rest"/>'
    report = tmp_path / "junit.xml"
    report.write_text(f"<testsuite>{f'{case}</properties></testcase>' * 5}</testsuite>")
    ran = subprocess.run(
        [sys.executable, SUMMARY, report], capture_output=True, text=True, check=True
    )
    assert re.search(r"^rest .* 2 s$", ran.stdout, re.MULTILINE)
