"""From a FILE.py or CONFIG.yaml to a training job."""
