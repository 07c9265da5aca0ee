"""See `karvan/compat/elasticai_api/util/grpc_utils.py`."""

from karvan.compat.elasticai_api.util.grpc_utils import build_channel

__all__ = ["build_channel"]
