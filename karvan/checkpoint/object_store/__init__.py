"""Checkpoints at URLs: objects of S3, Google storage, HDFS and any file system of fsspec."""
