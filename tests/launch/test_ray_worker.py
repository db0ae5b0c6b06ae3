from boltcutter_launch import ray_worker
from boltcutter_launch.ray_worker import Control


def test_the_exit_codes_of_the_last_attempt_count() -> None:
    control = Control()
    assert control.start() == 0
    assert not control.end(0, 1, -9, "rank 1 was killed")
    assert control.state() == (0, [-9], ["rank 1 was killed"])
    assert control.start() == 1
    assert not control.end(0, 0, 1, "rank 0 of the previous attempt")
    control.end(1, 0, 0, "")
    assert control.state() == (1, [0], [])
    assert control.poll(0) == ([], True)  # a process of an earlier attempt has to end
    assert control.poll(1) == ([], False)


def test_a_cancelled_run_is_not_restarted() -> None:
    control = Control()
    control.start()
    control.send(15)
    assert control.poll(0) == ([15], False)
    assert control.end(0, 0, 143, "rank 0 was killed by SIGTERM")
    assert control.start() == -1


def test_ranks_that_wait_for_a_failed_one_are_killed_after_a_while() -> None:
    control = Control()
    control.start()
    control.end(0, 0, 1, "rank 0 exited with status 1")
    assert control.poll(0) == ([], False)
    assert control._failed_at is not None
    control._failed_at -= ray_worker.FAILURE_GRACE + 1
    assert control.poll(0) == ([], True)
