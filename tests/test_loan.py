import threading

import pytest

from hicache_nixl.loan import Loan


def test_a_loan_lasts_until_its_end() -> None:
    """Pages may be used before the end of a loan, and not after it."""
    loan = Loan()
    with loan.using() as may:
        assert may
    assert not loan.is_over
    loan.end()
    loan.end()
    assert loan.is_over
    with loan.using() as may:
        assert not may


def test_the_end_waits_for_those_who_use_the_pages() -> None:
    """`end` returns only when the last user is through, and keeps new ones out meanwhile."""
    loan = Loan()
    with loan.using(), loan.using():
        ending = threading.Thread(target=loan.end)
        ending.start()
        while not loan.is_over:
            pass
        with loan.using() as may:
            assert not may
        ending.join(0.05)
        assert ending.is_alive()
    ending.join(10)
    assert not ending.is_alive()


def test_a_user_that_fails_gives_the_pages_back() -> None:
    """An exception inside `using` does not hold up the end."""
    loan = Loan()
    with pytest.raises(ValueError, match="on purpose"), loan.using():
        raise ValueError("on purpose")
    loan.end()
