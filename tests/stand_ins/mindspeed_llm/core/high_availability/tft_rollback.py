# SPDX-License-Identifier: Apache-2.0
from adaptor.callbacks import feature_rollback, get_args, mpu, rollback_callback, rolled_back

__all__ = ["feature_rollback", "get_args", "mpu", "rollback_callback", "rolled_back"]
