# SPDX-License-Identifier: Apache-2.0
"""The handler of the callbacks, the fault table, and the wrapper around ``train()``."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
from contextlib import nullcontext
from enum import Enum

from ..engine import Controller, Processor

ACTION_TIMEOUT = 20
EXIT_CODE = 2

rank_ = None
repair_id_ = None
uce_error_ = False
retry_error_ = False
mindio_export_function_version = None
processor = None
thread_context = nullcontext
"""Entered on every thread of TFT's: the simulated device is thread-local."""
calls = []
"""What TFT called, for the tests."""
force_stop_cond_ = threading.Condition()
main_reported_ = False


class ReportState(Enum):
    RS_NORMAL = 0
    RS_RETRY = 1
    RS_UCE = 2
    RS_UCE_CORRUPTED = 3
    RS_HCCL_FAILED = 4
    RS_UNKNOWN = 5
    RS_PREREPAIR_FINISH = 6


class RepairType(Enum):
    RT_SEND = 0
    RT_UCE_HIGHLEVEL = 1
    RT_UCE_LOWLEVEL = 2
    RT_ROLLBACK = 3
    RT_RECV_REPAIR = 4
    RT_LOAD_CKPT = 5
    RT_LOAD_REBUILD = 6


class SaveHandler:
    def __init__(self):
        self._args = None
        self._repair_step = 0
        self._need_rebuild = False
        self._error_ranks = None
        self._repair_info = None
        self._dump = None
        self._enable_retry = True
        self._slots = {}

    def enable_retry(self):
        return self._enable_retry

    def set_context(self, context):
        high = (RepairType.RT_UCE_HIGHLEVEL.value, RepairType.RT_LOAD_REBUILD.value)
        self._repair_step, self._need_rebuild = context["step"], context["repair_type"] in high
        self._error_ranks = context["dst"]
        self._repair_info = {key: context[key] for key in ("type", "repair_type", "src", "dst", "rank_list")}

    def _execute(self, kind, *args):
        call, ctx = self._slots.get(kind, (None, None))
        if call is None:
            return 0
        try:
            call(*args, ctx)
        except Exception as error:
            print(f"tft: {kind} raised {type(error).__name__}: {error}", flush=True)
            return 1
        return 0

    def execute_stop(self):
        return self._execute("stop", self._args)

    def execute_clean(self):
        call, ctx = self._slots["clean"]
        try:
            return call(uce_error_, self._args, ctx)
        except Exception as error:
            print(f"tft: clean raised {type(error).__name__}: {error}", flush=True)
            return 4

    def execute_rebuild_group(self, fault_ranks):
        return self._execute("rebuild", fault_ranks, self._args)

    def execute_repair(self):
        return self._execute(
            "repair", self._repair_step, self._need_rebuild, self._error_ranks, self._repair_info, self._args
        )

    def execute_rollback(self):
        return self._execute("rollback", self._repair_step, self._args)

    def execute_save(self):
        call, ctx = self._slots.get("save", (None, None))
        try:
            call(self._dump[0], self._dump[1], self._args, ctx)
        except Exception as error:
            print(f"tft: save raised {type(error).__name__}: {error}", flush=True)
            processor.dumped(1)
            return
        processor.dumped(0)


save_handler = SaveHandler()


def _register(kind):
    def register(func, ctx=None):
        if not callable(func):
            raise TypeError("func must be a callable")
        save_handler._slots[kind] = (func, ctx)  # one slot: the last writer wins

    return register


tft_register_stop_handler = _register("stop")
tft_register_clean_handler = _register("clean")
tft_register_repair_handler = _register("repair")
tft_register_rollback_handler = _register("rollback")
tft_register_save_ckpt_handler = _register("save")
tft_register_rebuild_group_handler = _register("rebuild")

# ---- on TFT's one thread -------------------------------------------------------------------------------------------


def _note(kind):
    calls.append((kind, threading.get_ident(), threading.current_thread() is threading.main_thread()))


def stop_callback():
    global main_reported_
    _note("stop")
    with force_stop_cond_:
        result = save_handler.execute_stop()
        processor.force = True
        if not (uce_error_ or retry_error_) and not force_stop_cond_.wait_for(lambda: main_reported_, ACTION_TIMEOUT):
            result = 1
        main_reported_ = False
    return result


def clean_callback():
    global uce_error_, retry_error_
    _note("clean")
    result = save_handler.execute_clean()
    uce_error_ = retry_error_ = False
    return result


def rebuild_callback(context):
    global repair_id_
    _note("rebuild")
    repair_id_ = context["repair_id"]
    return save_handler.execute_rebuild_group(context["fault_ranks"])


def repair_callback(context):
    global repair_id_
    _note("repair")
    repair_id_ = context["repair_id"]
    save_handler.set_context(context)
    return save_handler.execute_repair()


def rollback_callback(context):
    global repair_id_
    _note("rollback")
    repair_id_ = context["repair_id"]
    save_handler.set_context(context)
    return save_handler.execute_rollback()


def save_callback(context):
    save_handler._dump = (context["step"], [{"type": 0, "ranks": context["ranks"]}])

    def save():
        _note("save")
        with thread_context():
            save_handler.execute_save()

    threading.Thread(target=save).start()
    return 0


def exit_callback():
    threading.Timer(0.3, os._exit, (EXIT_CODE,)).start()
    return 0


# ---- on the training thread ----------------------------------------------------------------------------------------

fault_handles = {
    "UCE ERROR": lambda text: "UCE ERROR" if save_handler.enable_retry() else "OTHER",
    "HBM MULTI BIT ECC": lambda text: "HBM MULTI BIT ECC can repair",
    "FORCE STOP": lambda text: "FORCE STOP",
    "ARF FINISH": lambda text: "ARF FINISH",
    "HCCL OP RETRY FAILED": lambda text: "HCCL OP RETRY FAILED" if save_handler.enable_retry() else "OTHER",
}
fault_types = {
    "FORCE STOP": "RS_NORMAL",
    "ARF FINISH": "RS_PREREPAIR_FINISH",
    "UCE ERROR": "RS_UCE",
    "HBM MULTI BIT ECC can repair": "RS_UCE",
    "HCCL OP RETRY FAILED": "RS_HCCL_FAILED",
    "OTHER": "RS_UNKNOWN",
}


def tft_register_exception_handler(fault_pattern, fault_type, fault_handle):
    fault_types[fault_pattern] = fault_type
    fault_handles[fault_pattern] = fault_handle


def tft_report_error(state):
    global uce_error_, retry_error_, main_reported_
    if state is ReportState.RS_UCE:
        uce_error_ = True
    elif state is ReportState.RS_HCCL_FAILED:
        retry_error_ = True
    processor.report(state.name)
    with force_stop_cond_:
        main_reported_ = state in (ReportState.RS_NORMAL, ReportState.RS_UNKNOWN)
        force_stop_cond_.notify()
    if state is ReportState.RS_UNKNOWN:
        threading.Event().wait(ACTION_TIMEOUT)  # for the dump; the process is ended meanwhile
        os._exit(EXIT_CODE)


def tft_exception_handler(func):
    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        if mindio_export_function_version not in ("MindSpeed", "MindSpeed-LLM"):
            args = list(args)
        save_handler._args = args
        while True:
            failed = False
            try:
                result = func(*args, **kwargs)
                processor.close()
                return result
            except RuntimeError as error:
                text, kind = str(error), "OTHER"
                for pattern in fault_handles:
                    if pattern in text:
                        kind = fault_handles[pattern](text)
                        break
                print(f"tft: rank {rank_} caught {kind}: {text.splitlines()[0]}", flush=True)
                tft_report_error(ReportState[fault_types[kind]])
                if kind != "ARF FINISH" and not processor.wait_next_action():
                    os._exit(EXIT_CODE)
                failed = True
            except Exception as error:
                print(f"tft: rank {rank_} caught {type(error).__name__}: {error}", flush=True)
                tft_report_error(ReportState.RS_UNKNOWN)
                raise
            finally:
                gc.collect()
                if failed and not processor.wait_repair_action():
                    os._exit(EXIT_CODE)
                gc.collect()

    return wrapper


def tft_start_updating_os(backup_step=-1):
    processor.begin_updating()


def tft_end_updating_os(step):
    processor.finished_update(step)


def tft_report_load_ckpt_step(step):
    pass


def tft_get_repair_type():
    return processor.repair_type


def tft_get_repair_step():
    return save_handler._repair_step


def set_mindio_export_version(framework):
    global mindio_export_function_version
    mindio_export_function_version = framework


def get_mindio_export_version():
    return mindio_export_function_version


def tft_set_optimizer_replica(rank, replica_info):
    """``replica_info``: for each type of optimizer the ranks that share it, and how many copies of it they hold."""
    processor.set_replicas(replica_info)


def tft_is_reboot_node():
    return processor.repair_id != 0


def tft_init_processor(rank, world_size, stores, *, checkpoint=None, controlled=False):
    """``stores()``: a fresh client of the store that all ranks share; ``checkpoint``: a file to fall back to;
    ``controlled``: the controller is not in rank 0, but in a process of its own."""
    global rank_, repair_id_, processor
    rank_, repair_id_ = rank, 0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: print(f"tft: rank {rank} swallows the signal", flush=True))
    import sys

    controller = Controller(world_size, stores, checkpoint) if rank == 0 and not controlled else None
    processor = Processor(sys.modules[__name__], rank, stores, controller)
    processor.start()
