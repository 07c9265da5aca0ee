"""An error for each name: data shards find their master themselves."""

from karvan.compat.unsupported import missing_names

_SHARDS = "a DataShardService finds its master by MASTER_ADDR or from its job: give it no client."

__getattr__ = missing_names(
    "elasticai_api.common.master_client",
    dict.fromkeys(("MasterClient", "GlobalMasterClient", "build_master_client"), _SHARDS),
)
