from __future__ import annotations

from pathlib import Path

import pytest

from p99lab.lab import cgroups
from p99lab.lab.cgroups import OomKills

pytestmark = pytest.mark.light

PID = 7
VERSION_1 = """\
22 1 0:20 / /proc rw - proc proc rw
31 30 0:27 {root} {mount}/memory rw,nosuid shared:9 - cgroup cgroup rw,memory
32 30 0:28 {root} {mount}/cpu rw,nosuid shared:10 - cgroup cgroup rw,cpu,cpuacct
33 30 0:29 / {mount}/unified rw,nosuid shared:11 - cgroup2 cgroup2 rw,nsdelegate
"""
VERSION_2 = "31 30 0:27 {root} {mount} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


def machine(tmp_path: Path, mounts: str, membership: str, root: str = "/") -> tuple[Path, Path]:
    """A /proc and a cgroup mount of files."""
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    for process in ("self", str(PID)):
        (proc / process).mkdir(parents=True)
        (proc / process / "cgroup").write_text(membership)
    (proc / "self" / "mountinfo").write_text(mounts.format(mount=mount, root=root))
    return proc, mount


def version_1(counter: Path, kills: int) -> None:
    counter.parent.mkdir(parents=True, exist_ok=True)
    counter.write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")


def version_2(counter: Path, kills: int) -> None:
    counter.parent.mkdir(parents=True, exist_ok=True)
    counter.write_text(f"low 0\nhigh 3\nmax 9\noom 2\noom_kill {kills}\noom_group_kill 0\n")


def test_version_1_counts_in_the_processs_own_group(tmp_path: Path) -> None:
    proc, mount = machine(tmp_path, VERSION_1, "5:cpu,cpuacct:/elsewhere\n4:memory:/jobs/a\n0::/\n")
    version_1(mount / "memory/memory.oom_control", 5)
    version_1(mount / "memory/jobs/a/memory.oom_control", 1)
    kills = OomKills(PID, proc)
    assert not kills.happened()  # the one before does not count
    version_1(mount / "memory/memory.oom_control", 6)
    assert not kills.happened()  # somebody else's
    version_1(mount / "memory/jobs/a/memory.oom_control", 2)
    assert kills.happened()


def test_version_2_counts_in_the_processs_own_group(tmp_path: Path) -> None:
    proc, mount = machine(tmp_path, VERSION_2, "0::/user.slice/job\n")
    version_2(mount / "user.slice/memory.events", 4)
    version_2(mount / "user.slice/job/memory.events", 0)
    kills = OomKills(PID, proc)
    version_2(mount / "user.slice/memory.events", 5)
    assert not kills.happened()
    version_2(mount / "user.slice/job/memory.events", 1)
    assert kills.happened()


def test_a_group_without_the_memory_controller_is_counted_by_the_one_above(tmp_path: Path) -> None:
    proc, mount = machine(tmp_path, VERSION_2, "0::/user.slice/job\n")
    version_2(mount / "user.slice/memory.events", 0)
    kills = OomKills(PID, proc)
    version_2(mount / "user.slice/memory.events", 1)
    assert kills.happened()


def test_in_a_container_only_its_own_part_of_the_tree_is_mounted(tmp_path: Path) -> None:
    proc, mount = machine(tmp_path, VERSION_1, "4:memory:/docker/abc/inner\n", root="/docker/abc")
    version_1(mount / "memory/inner/memory.oom_control", 0)
    kills = OomKills(PID, proc)
    version_1(mount / "memory/inner/memory.oom_control", 1)
    assert kills.happened()


@pytest.mark.parametrize("membership", ["4:memory:/docker/other\n", "4:memory:/../../other\n", ""])
def test_a_group_out_of_sight_is_counted_by_the_top_of_what_is_mounted(tmp_path: Path, membership: str) -> None:
    proc, mount = machine(tmp_path, VERSION_1, membership, root="/docker/abc" if "docker" in membership else "/")
    version_1(mount / "memory/memory.oom_control", 0)
    kills = OomKills(PID, proc)
    version_1(mount / "memory/memory.oom_control", 1)
    assert kills.happened()


def test_where_nothing_counts_nothing_is_claimed(tmp_path: Path) -> None:
    assert not OomKills(PID, tmp_path).happened()
    proc, mount = machine(tmp_path, VERSION_2, "0::/job\n")
    (mount / "job").mkdir(parents=True)
    (mount / "job/memory.events").write_text("low 0\noom 7\n")  # an old kernel
    assert not OomKills(PID, proc).happened()


def test_groups_of_a_name_are_removed_with_those_below_and_no_others(tmp_path: Path) -> None:
    proc, mount = machine(tmp_path, VERSION_1, "4:memory:/jobs/a\n5:cpu,cpuacct:/\n0::/\n")
    ours = [mount / "memory/mine", mount / "memory/jobs/a/mine", mount / "cpu/mine", mount / "unified/mine"]
    others = [mount / "memory/mine2", mount / "memory/jobs/b/mine"]
    for group in (*ours, *others):
        (group / "below").mkdir(parents=True)
    assert set(cgroups.named("mine", proc)) == set(ours)
    cgroups.remove("mine", proc)
    assert cgroups.named("mine", proc) == []
    assert all(group.is_dir() for group in others)
