"""A killed build leaves nothing that the next one waits for, and two builds never run at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.train.build_lock import FOLDER, VARIABLE, exclusive_build, own_build_folder

HOLD = """
import sys, time
from pathlib import Path
from pipeline.train.build_lock import exclusive_build
folder = Path(sys.argv[1])
with exclusive_build(folder):
    (folder / "op").mkdir(exist_ok=True)
    (folder / "op" / "lock").touch()
    print("holding", flush=True)
    time.sleep(600)
"""


def test_the_mark_of_a_killed_build_is_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holding\n"
        entered = threading.Event()

        def build() -> None:
            with exclusive_build(tmp_path):
                entered.set()

        waiting = threading.Thread(target=build)
        waiting.start()
        assert not entered.wait(0.5), "a second build ran beside the first"
        assert (tmp_path / "op" / "lock").exists()
        os.kill(holder.pid, signal.SIGKILL)
        waiting.join(timeout=60)
    assert entered.is_set()
    assert not (tmp_path / "op" / "lock").exists()


def test_the_folder_is_our_own_and_chosen_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert own_build_folder() == tmp_path / FOLDER
    assert own_build_folder() == tmp_path / FOLDER
    assert os.environ[VARIABLE] == str(tmp_path / FOLDER)
