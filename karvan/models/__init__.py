"""Models: plain torch modules that contain an embedding engine.

They return logits.
"""

from karvan.argument_checks import publish
from karvan.models.dcn import DCN
from karvan.models.deepfm import DeepFM
from karvan.models.din import DIN
from karvan.models.dlrm import DLRM
from karvan.models.mmoe import MMoE
from karvan.models.parts import pairwise_dots
from karvan.models.wide_deep import WideDeep

__all__ = ["DLRM", "DeepFM", "DCN", "DIN", "WideDeep", "MMoE", "pairwise_dots"]

publish("karvan.models")
