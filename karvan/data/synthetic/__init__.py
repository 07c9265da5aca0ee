"""Synthetic click logs and the model that their labels are drawn from."""

from karvan.data.synthetic.click_log import ClickLog, ClickLogSource, Written, expected_auc
from karvan.public_names import publish

__all__ = ["ClickLog", "ClickLogSource", "Written", "expected_auc"]


publish("karvan.data.synthetic")
