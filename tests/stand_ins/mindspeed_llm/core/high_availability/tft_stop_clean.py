# SPDX-License-Identifier: Apache-2.0
"""Stop and clean of the simulated device."""

from mindio_ttp.framework_ttp.ttp_decorator import tft_get_repair_type
from toy import training

MODEL, OPTIM = 1, 2


def stop_callback(train_args, ctx):
    training.device.stop()


def clean_callback(is_uce_error, train_args, ctx):
    result = 0
    if is_uce_error:
        found = training.device.check_uce_in_memory()
        print(f"adaptor: memory check answers {found}", flush=True)
        if found == 2:
            result = 2
        elif found == 3:
            optimizer = train_args[OPTIM]
            for tensor in (optimizer.model.grad, *optimizer.tensors(0), *optimizer.tensors(1)):
                training.device.mark_safe(tensor)
        else:
            result = 1
    tft_get_repair_type()
    training.device.restart()
    return result


def save_callback(step, save_info, train_args, ctx):
    args, optimizer = training.get_args(), train_args[OPTIM]
    values = {key: entry["values"] for key, entry in training.parallel_state._MOE_LAYER_WISE_LOGGING_TRACKER.items()}
    import torch

    torch.save({"step": step, "weight": optimizer.model.weight, "tracker": values}, f"{args.dump}.{training.rank}")
