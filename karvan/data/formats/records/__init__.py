"""Files of byte records, TFRecord and RecordIO, and tf.Example, which they mostly hold."""
