"""The cause of a worker's death, found in its own log."""

from __future__ import annotations

from pathlib import Path

from gemray_cluster.ray_runtime.worker_log import last_words


def test_the_last_error_of_that_process_is_told(tmp_path: Path) -> None:
    (tmp_path / "worker-0a1b-01000000-77.err").write_text("loading\nOSError: [Errno 24] Too many open files\nbye\n")
    (tmp_path / "python-core-worker-0a1b_77.log").write_text("[C] Check failed: another cause\n")
    (tmp_path / "python-core-worker-2c3d_78.log").write_text("[I] connected\n[E] epoll: Too many open files\n")
    (tmp_path / "worker-2c3d-01000000-78.err").write_text("")
    assert last_words(tmp_path, 77) == "OSError: [Errno 24] Too many open files"
    assert last_words(tmp_path, 78) == "[E] epoll: Too many open files"
    assert last_words(tmp_path, 7) is None


def test_a_log_is_read_from_its_end_and_told_briefly(tmp_path: Path) -> None:
    lines = "Error: an old one\n" + "fine\n" * 100_000 + "Error: " + "x" * 5000 + "\n"
    (tmp_path / "worker-0-1-9.err").write_text(lines)
    assert last_words(tmp_path, 9) == "x" * 300
    (tmp_path / "worker-0-1-9.err").write_text("Error: an old one\n" + "fine\n" * 100_000)
    assert last_words(tmp_path, 9) is None
