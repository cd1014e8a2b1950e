"""What is read out of a server's answers."""

import pytest
from engine_cpu.replies import metric_sum

METRICS = """\
# HELP sglang:backup_pgs pages
sglang:backup_pgs_sum{pp_rank="0",tp_rank="0"} 3.0
sglang:backup_pgs_sum{pp_rank="0",tp_rank="1"} 4.0
sglang:backup_pgs_sum_of_all{tp_rank="1"} 9.0
sglang:alone 1e+03
other:backup_pgs_sum{tp_rank="1"} 5.0
"""


@pytest.mark.parametrize(
    ("name", "labels", "total"),
    [
        ("backup_pgs_sum", {}, 7.0),
        ("backup_pgs_sum", {"tp_rank": "1"}, 4.0),
        ("backup_pgs_sum", {"tp_rank": "1", "pp_rank": "1"}, 0.0),
        ("alone", {}, 1000.0),
        ("backup", {}, 0.0),
    ],
)
def test_metric_is_summed_over_the_samples_with_its_labels(
    name: str, labels: dict[str, str], total: float
) -> None:
    """Only samples of exactly this name with all the labels count."""
    assert metric_sum(METRICS, name, labels) == total
