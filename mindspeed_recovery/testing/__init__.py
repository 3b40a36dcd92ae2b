# SPDX-License-Identifier: Apache-2.0
"""What tests and drills need instead of faulty hardware: simulated device memory and injected faults."""
