"""Tables on the GPUs of several ranks: keys, vectors and gradients between requesters and owners of rows."""
