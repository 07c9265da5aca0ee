"""The files of a checkpoint; docs/checkpoint.md shows them, and this is the rest.

- **Parts** of a table are ranges of key hashes (`csrc/hash/mix.h`, version 1), so choosing files means
  choosing shards. A part's entry has the upper 32 bits of its least hash, `first`; it ends where the next
  one starts. One process divides a table into a power of two of equal parts. With several ranks, each rank
  does the same with a number of parts that suits its own rows, and writes the hashes that it owns of each
  part. Manifests without `first` have equal parts.
- **Extras** (`extras` of a table): a file, or null, for each rank that saved it; rank 0's has the clock. A
  file has the counters of the rank's own hashes, `filter_counts`, and `filter_place`: their position in the
  whole filter, and its size. If two ranks have the same counter, the larger one counts. Older manifests
  have one file, `extra`.
- **Updates** (`updates` of a table on parameter servers): for each server, how many updates its rows
  contain, by the `run` and `store` in which they are counted and by trainer. From it a restarted server
  knows which updates are lost.
- **Deltas**: `base` is the folder, step, id and checksum of the checkpoint before. A key can be removed and
  added again, so a delta is applied by removing its keys first.
"""
