# SPDX-License-Identifier: Apache-2.0
"""The controller (in rank 0) and the processor of each rank, over a store: what the C++ part of MindIO TFT does."""

from __future__ import annotations

import json
import os
import threading
import time

POLL_SECONDS = 0.003
REPLY_SECONDS = 15


class Processor:
    def __init__(self, tft, rank, stores, controller=None):
        self.tft, self.rank = tft, rank
        self.force = False
        self.repair_type = "unknow"
        self._store, self._status_store = stores(), stores()
        self._status = {"step": 0, "data": "updated"}
        self._epoch = self._number = self.repair_id = 0
        self._wait = threading.Semaphore(0)
        self._go = False
        self._left = threading.Event()
        self._closed = threading.Event()
        self._controller = controller

    def start(self):
        if self._store.check(
            [f"tft/awaited/{self.rank}"]
        ):  # the controller answers the register message of a new process
            self._epoch, self._number = json.loads(self._store.get(f"tft/awaited/{self.rank}"))
            self.repair_id = self._epoch + 1
        self._publish()
        if self._controller is not None:
            self._controller.start()
        threading.Thread(target=self._run, name="tft", daemon=True).start()

    def close(self):
        self._closed.set()
        if self._controller is not None:
            self._controller.closed.set()

    # ---- training thread

    def begin_updating(self):
        if self.force:
            self.force = False
            raise RuntimeError("FORCE STOP. By stand-in BeginUpdating")
        self._status["data"] = "updating"
        self._publish()

    def finished_update(self, step):
        self._status.update(step=step, data="updated")
        self._publish()

    def report(self, state):
        self._status_store.set(f"tft/{self._epoch}/report/{self.rank}", state)
        if state not in ("RS_NORMAL", "RS_PREREPAIR_FINISH", "RS_STEP_FINISH"):
            self._status_store.add(f"tft/{self._epoch}/fault", 1)

    def wait_next_action(self):
        self._wait.acquire()
        return self._go

    def wait_repair_action(self):
        self._left.set()
        return self.wait_next_action()

    def dumped(self, code):
        self._status_store.set(f"tft/dumped/{self.rank}", str(code))

    def _publish(self):
        self._status_store.set(f"tft/status/{self.rank}", json.dumps(self._status))

    # ---- TFT's thread

    def _run(self):
        number = self._number
        with self.tft.thread_context():
            while not self._closed.is_set():
                if not self._store.check([f"tft/command/{number}"]):
                    time.sleep(POLL_SECONDS)
                    continue
                command = json.loads(self._store.get(f"tft/command/{number}"))
                mine = command["ranks"].get(str(self.rank))
                if mine is not None:
                    try:
                        code = self._do(command["op"], mine)
                        if not isinstance(code, int):
                            raise TypeError(f"{command['op']} answered {code!r}")
                    except BaseException as error:  # C++ has nobody to hand it to
                        self._store.set("tft/aborted", str(self.rank))
                        print(f"tft: rank {self.rank} aborts: {type(error).__name__}: {error}", flush=True)
                        os.abort()
                    self._store.set(f"tft/reply/{number}/{self.rank}", str(code))
                number += 1

    def _do(self, op, context):
        if op == "repair":
            self._left.wait(REPLY_SECONDS)  # until the training thread has left train()
        if op in ("stop", "clean"):
            self.repair_type = context["repair_type"]
            return getattr(self.tft, f"{op}_callback")()
        if op == "rollback":
            self._status["step"] = context["step"]
        if op in ("rebuild", "repair", "rollback", "save"):
            return getattr(self.tft, f"{op}_callback")(context)
        if op == "exit":
            return self.tft.exit_callback()
        if op == "resume":
            self._epoch += 1
            self.force = False
            self._left.clear()
            self._publish()
        self._go = True
        self._wait.release()
        return 0


class Controller(threading.Thread):
    """``replicas``: for each type of optimizer, how many copies of a shard a group holds and the groups of ranks; empty for
    an optimizer without replicas. ``scheduler``: who starts dead processes again, if somebody does: ``lost()`` names their
    ranks, ``start_again(ranks)`` asks for new ones."""

    def __init__(self, world_size, stores, replicas, checkpoint, scheduler=None):
        super().__init__(name="tft-controller", daemon=True)
        self.closed = threading.Event()
        self._ranks = range(world_size)
        self._scheduler = scheduler
        self._store = stores()
        self._replicas, self._checkpoint = replicas, checkpoint
        self._number = 0
        self._epoch = 0

    def run(self):
        while not self.closed.wait(POLL_SECONDS):
            lost = self._scheduler.lost() if self._scheduler is not None else []
            if lost or self._store.add(f"tft/{self._epoch}/fault", 0):
                if not (self._replace(lost) if lost else self._recover()):
                    self._all("exit", {})
                    return
                self._epoch += 1

    def _all(self, op, context, ranks=None):
        """Give every rank its command and return the codes; a rank that does not answer has failed."""
        per_rank = context if ranks is not None else dict.fromkeys(self._ranks, context)
        number, self._number = self._number, self._number + 1
        command = {"op": op, "ranks": {str(rank): mine for rank, mine in per_rank.items()}}
        self._store.set(f"tft/command/{number}", json.dumps(command))
        deadline = time.monotonic() + REPLY_SECONDS
        keys = {rank: f"tft/reply/{number}/{rank}" for rank in per_rank}
        while not self._store.check(list(keys.values())) and time.monotonic() < deadline:
            if self._store.check(["tft/aborted"]):  # the connection of a rank that is gone is closed
                break
            time.sleep(POLL_SECONDS)
        return {rank: int(self._store.get(key)) if self._store.check([key]) else 1 for rank, key in keys.items()}

    def _statuses(self):
        return {rank: json.loads(self._store.get(f"tft/status/{rank}")) for rank in self._ranks}

    def _recover(self):
        if max(status["step"] for status in self._statuses().values()) == 0:
            print("tft: no optimizer update yet: refused", flush=True)
            return False
        kinds = self._reports()
        dump = "RS_UNKNOWN" in kinds.values()
        if any(self._all("stop", {"repair_type": "dump" if dump else "retry"}).values()):
            return False
        kinds = self._reports()
        dump = dump or "RS_UNKNOWN" in kinds.values()
        codes = self._all("clean", {"repair_type": "dump" if dump else "retry"})
        if any(code not in (0, 2) for code in codes.values()):
            return False
        statuses = self._statuses()
        step = max(status["step"] for status in statuses.values())
        if dump:
            self._dump(step)
            return False
        self._all("release", {})
        context = self._context(step)
        if any(kinds[rank] == "RS_UCE" and codes[rank] == 0 for rank in self._ranks):
            step = context["step"]
            hit = [rank for rank in self._ranks if kinds[rank] == "RS_UCE" and codes[rank] == 0]
            behind = [r for r in self._ranks if statuses[r]["data"] != "updated" or statuses[r]["step"] != step]
            whole = [rank for rank in self._ranks if rank not in hit and rank not in behind and codes[rank] == 0]
            if not self._repair(
                context, [r for r in self._ranks if r in hit or (r in behind and codes[r] == 0)], hit, whole
            ):
                return False
        return self._roll_back(context)

    def _replace(self, lost):
        """Processes have died ("ARF"): the others stop, new ones come, and all links are built anew."""
        alive = [rank for rank in self._ranks if rank not in lost]
        step = max(status["step"] for status in self._statuses().values())
        if step == 0:
            print("tft: no optimizer update yet: refused", flush=True)
            return False
        for op in ("stop", "clean"):
            if any(self._all(op, {rank: {"repair_type": "recover"} for rank in alive}, ranks=alive).values()):
                return False
        self._all("release", {rank: {} for rank in alive}, ranks=alive)
        return self._admit(lost, self._context(step))

    def _admit(self, lost, context):
        for rank in lost:
            self._store.set(f"tft/awaited/{rank}", json.dumps([self._epoch, self._number]))
        self._scheduler.start_again(lost)
        keys = [f"tft/{self._epoch}/report/{rank}" for rank in lost]
        deadline = time.monotonic() + REPLY_SECONDS
        while not self._store.check(keys):  # "ARF FINISH"
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        if any(self._all("rebuild", {"fault_ranks": lost, "repair_id": context["repair_id"]}).values()):
            return False
        statuses = self._statuses()
        step = context["step"]
        wrong = [r for r in self._ranks if r in lost or statuses[r]["data"] != "updated" or statuses[r]["step"] != step]
        whole = [rank for rank in self._ranks if rank not in wrong]
        return self._repair(context, wrong, [], whole) and self._roll_back(context)

    def _context(self, step):
        context = {"step": step, "repair_id": self._epoch + 1, "rank_list": [], "repair_type": 3}
        return context | {"type": [], "src": [], "dst": []}

    def _repair(self, context, wrong, hit, whole):
        plans = self._plan(context, wrong, hit, whole)
        return plans is not None and not any(self._all("repair", plans, ranks=plans).values())

    def _roll_back(self, context):
        if any(self._all("rollback", context).values()):
            return False
        self._all("resume", {})
        return True

    def _reports(self):
        reports = {rank: f"tft/{self._epoch}/report/{rank}" for rank in self._ranks}
        return {r: self._store.get(key).decode() if self._store.check([key]) else "" for r, key in reports.items()}

    def _plan(self, context, wrong, hit, whole):
        """What each rank that takes part has to do; its lists run in parallel, over all types of optimizers."""
        from .framework_ttp.ttp_decorator import RepairType

        triples = [] if self._replicas else None
        for kind, (copies, groups) in enumerate(self._replicas):
            for group in groups:
                for place in (place for place, rank in enumerate(group) if rank in wrong):
                    shift = len(group) // copies
                    others = [group[(place + i * shift) % len(group)] for i in range(1, copies)]
                    source = next((rank for rank in others if rank in whole), None)
                    if source is None:
                        triples = None
                    elif triples is not None:
                        triples.append((kind, source, group[place]))
        if triples is None:
            if self._checkpoint is None or not os.path.exists(self._checkpoint):
                return None
            kind = {r: RepairType.RT_LOAD_REBUILD if r in hit else RepairType.RT_LOAD_CKPT for r in self._ranks}
            return {rank: context | {"repair_type": kind[rank].value} for rank in self._ranks}
        members = sorted({rank for triple in triples for rank in triple[1:]})
        plans = {}
        for rank in members:
            mine = [triple for triple in triples if rank in triple[1:]]
            high = RepairType.RT_UCE_HIGHLEVEL if rank in hit else RepairType.RT_RECV_REPAIR
            plans[rank] = context | {
                "repair_type": high.value if rank in wrong else RepairType.RT_SEND.value,
                "type": [kind for kind, _, _ in mine],
                "src": [source for _, source, _ in mine],
                "dst": [destination for _, _, destination in mine],
                "rank_list": members,
            }
        return plans

    def _dump(self, step):
        self._all("save", {"step": step, "ranks": list(self._ranks)})
        deadline = time.monotonic() + REPLY_SECONDS
        keys = [f"tft/dumped/{rank}" for rank in self._ranks]
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
