"""Synthetic click logs and the model that their labels are drawn from."""

from karvan.data.synthetic.click_log import ClickLog, ClickLogSource, Written, expected_auc

__all__ = ["ClickLog", "ClickLogSource", "Written", "expected_auc"]
