"""Track which ranks are present, late or dead. Ranks meet in torch's store; a thread in each watches the others.

A collective that waits for a missing rank prints nothing, or a page of torch's traceback. Here each rank writes its
current stage to the store. The watching thread runs while the main thread waits inside a collective. It names the
missing rank in one line and ends this rank.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from gearbox import processes
from gearbox.launch import outcome
from gearbox.launch.environment import LaunchEnvironment

T = TypeVar("T")

THREAD = "rank registry"
LOOK_SECONDS = 0.25
STILL_SECONDS = 2.5  # ten looks; a rank whose thread writes nothing for this long is dead or stopped
WAITS = "waits"
GRACE_SECONDS = 30.0  # a collective's own timeout exceeds the registry's by this much


class RankRegistry:
    """The ranks of this launch. Every rank creates one, and calls `enter_stage` and `gather` in the same order."""

    def __init__(self, timeout: float, on_loss: Callable[[str, bool], None]) -> None:
        """Join the store. A rank that ends early first calls `on_loss(line, speaks)`, in any thread; one speaks."""
        self._launched = LaunchEnvironment.read()
        self.rank, self.size = self._launched.rank, self._launched.size
        self.local_rank, self.local_size = self._launched.local_rank, self._launched.local_size
        self.timeout, self.on_loss = timeout, on_loss
        self.hosts: dict[int, str] = {}
        self._number, self._beats, self._stage, self._began = 0, 0, "start", time.monotonic()
        self._waits_for_all = True
        self._siblings: dict[int, psutil.Process] = {}
        self._ending = threading.RLock()
        self.store = self._join()
        self._own = self.store
        self._wakeup = -1
        if self.size > 1:
            self._own = self._join()  # a client serves one call at a time, and the main thread may be in one
            self._listen()
            threading.Thread(target=self._run, name=THREAD, daemon=True).start()

    def _join(self) -> Store:
        if self.size == 1:
            return HashStore()
        host, port = self._launched.store_host, self._launched.store_port
        is_master = self.rank == 0 and not self._launched.agent_has_store and not hasattr(self, "store")
        timeout = timedelta(seconds=self.timeout)
        try:
            store = TCPStore(
                host, port, is_master=is_master, wait_for_workers=False, multi_tenant=True, timeout=timeout
            )
        except RuntimeError:  # includes torch's DistNetworkError
            line = (
                f"rank {self.rank} ({socket.gethostname()}) cannot reach rank 0's store at {host}:{port} "
                f"(MASTER_ADDR, MASTER_PORT) within {self.timeout:g} s"
            )
            self.on_loss(line, self.local_rank == 0)
            os._exit(outcome.EXIT_CRASHED)
        # After a restart by the launcher, ranks join the same store.
        return PrefixStore(f"doctor/{self._launched.restart_count}", store)

    def check_in(self) -> None:
        """Wait for every rank. From then on hosts are known, and a dead rank on this machine is noticed at once."""
        placed: list[tuple[str, int]] = self.gather("check-in", (socket.gethostname(), os.getpid()))
        self.hosts = {rank: host for rank, (host, _) in enumerate(placed)}
        for rank, (host, pid) in enumerate(placed):
            if host == socket.gethostname() and rank != self.rank and psutil.pid_exists(pid):
                self._siblings[rank] = psutil.Process(pid)

    def join_process_group(self, device: torch.device) -> None:
        """Join torch's process group of all ranks: NCCL on GPUs, gloo on the CPU."""
        self.enter_stage("the process group")
        is_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_gpu else "gloo",
            store=PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self.timeout + GRACE_SECONDS),
            device_id=device if is_gpu else None,
        )

    def enter_stage(self, stage: str) -> None:
        """Record what this rank does now. All ranks enter the same stages, so that a late rank can be named."""
        self._number += 1
        self._stage, self._began = stage, time.monotonic()
        self.store.set(f"at/{self.rank}", f"{self._number} {stage}")

    def gather(self, name: str, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank. Each call needs a new name.

        Values pass through JSON, so tuples become lists.
        """
        self.enter_stage(name)
        self.store.set(f"{name}/{self.rank}", json.dumps([socket.gethostname(), value]))
        if self.store.add(f"{name}/count", 1) == self.size:
            self.store.set(f"{name}/all", "1")
        wait = 0.002
        while not self.store.check([f"{name}/all"]):
            time.sleep(wait)
            wait = min(0.1, wait * 1.5)  # the watching thread enforces the timeout
        return [json.loads(self.store.get(f"{name}/{rank}"))[1] for rank in range(self.size)]

    def leave(self) -> None:
        """Stop watching. Rank 0 leaves last, because it may host the store."""
        with self._ending:  # the thread stops looking
            self._waits_for_all = False
        self.store.set(f"left/{self.rank}", "1")
        self.store.add("left", 1)
        deadline = time.monotonic() + self.timeout
        while self.rank == 0 and self.store.add("left", 0) < self.size and time.monotonic() < deadline:
            time.sleep(0.01)

    def fail(self, error: Exception) -> NoReturn:
        """End this rank after an error. If another rank's death caused it, name that rank instead."""
        if self.size > 1:
            time.sleep(2 * LOOK_SECONDS)  # the thread may notice a dead rank on this machine, and end this one
            with suppress(RuntimeError):
                if silent := self._silent():
                    self._end(self._gone(silent))
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        self._end(f"rank {self.rank} ({socket.gethostname()}) failed in {self._stage}: {first_line[:200]}")

    def _listen(self) -> None:
        self._wakeup, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # wakes the thread, which decides

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._wakeup], [], [], LOOK_SECONDS)
            for number in os.read(self._wakeup, 64) if ready else b"":
                self._stop(number)
            with self._ending:
                if not self._waits_for_all:
                    continue
            if dead := self._dead_here():
                self._end(self._gone(dead))
            try:
                self._beat()
                if time.monotonic() - self._began > self.timeout:
                    self._end(self._late())
            except RuntimeError:  # the store does not answer
                self._end(f"lost the store at {self._launched.store_host}: the launcher there has ended")

    def _stop(self, number: int) -> None:
        """End this rank on a signal. SIGTERM comes from the launcher after a rank died, or from a user."""
        if number == signal.SIGINT:
            os._exit(outcome.EXIT_INTERRUPTED)
        if self._waits_for_all:
            deadline = time.monotonic() + 2 * LOOK_SECONDS
            while time.monotonic() < deadline:
                if dead := self._dead_here():
                    self._end(self._gone(dead))
                time.sleep(LOOK_SECONDS / 10)
        os._exit(outcome.EXIT_CRASHED)

    def _dead_here(self) -> list[int]:
        """Return the ranks on this machine that died before leaving."""
        dead = [rank for rank, process in list(self._siblings.items()) if not processes.is_alive(process)]
        with suppress(RuntimeError):
            return [rank for rank in dead if not self._client().check([f"left/{rank}"])]
        return dead

    def _beat(self) -> None:
        self._beats += 1
        self._own.set(f"beat/{self.rank}", f"{self._beats} {_doing()}")

    def _silent(self) -> list[int]:
        """Return the ranks whose thread has stopped writing: the rank is dead or stopped, or its machine is gone."""
        before = self._read("beat")
        deadline = time.monotonic() + STILL_SECONDS
        while time.monotonic() < deadline:
            if threading.current_thread() is not threading.main_thread():
                self._beat()  # another rank's thread may be checking this rank now
            time.sleep(LOOK_SECONDS)
        after = self._read("beat")
        return [rank for rank in range(self.size) if rank != self.rank and before[rank] == after[rank]]

    def _late(self) -> str:
        """Describe the ranks that the others wait for: absent, silent, behind or busy ranks."""
        at = self._read("at")
        absent = [rank for rank, text in enumerate(at) if text is None]
        if absent:
            return f"{self._ranks(absent)} did not start within {self.timeout:g} s"
        if silent := self._silent():
            return (
                f"{self._ranks(silent)} {_do(silent)} not respond in {_stage(at[silent[0]])}: dead, stopped or "
                "disconnected"
            )
        steps = [int(str(text).partition(" ")[0]) for text in at]
        late = [rank for rank, step in enumerate(steps) if step == min(steps)]
        if len(late) < self.size:
            ahead = _stage(at[steps.index(max(steps))])
            return (
                f"{self._ranks(late)} did not reach {ahead} within {self.timeout:g} s; still in {_stage(at[late[0]])}"
            )
        doing = [str(text).partition(" ")[2] for text in self._read("beat")]
        busy = [rank for rank, text in enumerate(doing) if text != WAITS]
        if busy and len(busy) < self.size:
            return f"{self._ranks(busy)} did not join {self._stage} within {self.timeout:g} s; running {doing[busy[0]]}"
        return (
            f"all ranks are in {self._stage}, which did not finish within {self.timeout:g} s; no rank is late, so "
            "check the network"
        )

    def _gone(self, ranks: list[int]) -> str:
        try:
            where = f" in {_stage(self._read('at')[ranks[0]])}"
        except RuntimeError:  # the store died too
            where = ""
        return f"{self._ranks(ranks)} died{where}"

    def _read(self, key: str) -> list[str | None]:
        """Return the value of each rank; None for a rank that has not written one."""
        store = self._client()
        names = [f"{key}/{rank}" for rank in range(self.size)]
        return [store.get(name).decode() if store.check([name]) else None for name in names]

    def _ranks(self, ranks: list[int]) -> str:
        """Return `rank 3 (node2)` or `ranks 4, 5 (node3)`. An absent rank gets the host of its machine's others."""
        hosts = dict.fromkeys(self._host(rank) for rank in ranks)
        shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        return f"rank{'s' if len(ranks) > 1 else ''} {shown} ({', '.join(hosts)})"

    def _host(self, rank: int) -> str:
        if rank in self.hosts:
            return self.hosts[rank]
        machine = rank // self.local_size
        for other in range(machine * self.local_size, min(self.size, (machine + 1) * self.local_size)):
            if self._client().check([f"check-in/{other}"]):
                return str(json.loads(self._client().get(f"check-in/{other}"))[0])
        return f"machine {machine}, where no rank started"

    def _client(self) -> Store:
        return self._own if threading.current_thread().name == THREAD else self.store

    def _end(self, line: str) -> NoReturn:
        """Report the line, on all machines but printed by one rank, and end this rank."""
        with self._ending:
            if self._waits_for_all:
                try:
                    speaks = self._client().add("spoken", 1) == 1
                    if speaks:
                        self._client().set("said", line)
                    elif self._client().check(["said"]):
                        line = self._client().get("said").decode()
                except RuntimeError:
                    speaks = self.local_rank == 0
                self.on_loss(line, speaks)
            os._exit(outcome.EXIT_CRASHED)


def _doing() -> str:
    """Return WAITS if the main thread waits in a collective or for the GPU, else its line of code."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    code = frame.f_code
    path = Path(code.co_filename)
    if ({"distributed", "cuda"} & {*path.parts} and "torch" in path.parts) or code.co_name == "_exchange":
        return WAITS
    return f"{code.co_name} ({path.name}:{frame.f_lineno})"


def _do(ranks: list[int]) -> str:
    return "do" if len(ranks) > 1 else "does"


def _stage(text: str | None) -> str:
    return (text or "0 start").partition(" ")[2]
