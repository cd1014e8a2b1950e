from hicache_nixl.pace import Pace


def test_once_after_each_pause() -> None:
    """What happens all the time is spoken of once in a pause, from the first time on."""
    now = 0.0
    pace = Pace(10.0, clock=lambda: now)
    told = []
    for _ in range(25):
        if pace.allows():
            told.append(now)
        now += 1.0
    assert told == [0.0, 10.0, 20.0]
