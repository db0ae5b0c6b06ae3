from boltcutter.environment.platform_facts import DEVICES, JOB, NODES, PLATFORM, job_port, job_run_id, launched_layout


def test_what_a_part_has_read_is_the_layout_and_the_run_id() -> None:
    assert launched_layout({}) is None
    assert job_run_id(["seed=1"], {}) is None
    read = {PLATFORM: "cloud", NODES: "2", JOB: "cloud-7"}
    assert launched_layout(read) == ("cloud", 2, None)
    assert launched_layout({**read, DEVICES: "4"}) == ("cloud", 2, 4)
    assert job_run_id(["seed=1"], read) == job_run_id(["seed=1"], read) != job_run_id(["seed=2"], read)
    assert str(job_run_id([], read)).startswith("cloud-7-")


def test_the_port_of_a_job_is_below_the_ephemeral_range() -> None:
    ports = {job_port(f"job {number}") for number in range(100)}
    assert len(ports) > 90
    assert all(20_000 <= port < 32_000 for port in ports)
