# SPDX-License-Identifier: Apache-2.0
from adaptor.optimizer import ReplicaOptimizer as TTPReplicaOptimizer

__all__ = ["TTPReplicaOptimizer"]
