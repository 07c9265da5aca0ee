"""Files of byte records, TFRecord and RecordIO, and tf.Example, their usual content."""
