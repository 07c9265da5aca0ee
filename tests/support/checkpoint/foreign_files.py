"""Writes checkpoints of RecIS and PERSIA, as their public sources say, without any code of Karvan's readers.

RecIS's files are stock safetensors and JSON; PERSIA's are packed number by number.
"""

import json
import struct

import torch
import yaml
from safetensors.torch import save_file

SLICES = 65536


def write_recis(
    folder,
    tables,
    *,
    ranks=1,
    files=1,
    scalars=None,
    dense=None,
    extra=None,
    owner=lambda key, ranks: key % ranks,
):
    """tables: {name: {"id": [...], slot: tensor}}; an id is saved by the rank that owns it.

    files: how many each rank writes, in turns.
    """
    folder.mkdir(parents=True)
    bounds = [SLICES // ranks * rank + min(rank, SLICES % ranks) for rank in range(ranks + 1)]
    names, file_index, block_index = {}, {}, {}
    for rank in range(ranks):
        contents = [{} for _ in range(files)]
        turn = 0
        for table, slots in tables.items():
            ids = torch.tensor(slots["id"], dtype=torch.int64)
            mine = torch.tensor([owner(key, ranks) == rank for key in ids.tolist()], dtype=torch.bool)
            for slot, values in slots.items():
                stored = f"{table}.{slot}/part_{rank}_{ranks}"
                width = len(str(SLICES))
                begin, end = (str(bound).zfill(width) for bound in bounds[rank : rank + 2])
                names[stored] = f"{table}@{slot}^{begin}@{end}@{SLICES}"
                whole = ids if slot == "id" else values
                contents[turn % files][stored] = whole[mine].contiguous()
                turn += 1
        for name, value in (scalars or {}).items() if rank == 0 else ():
            contents[turn % files][f"{name}^ "] = value
            turn += 1
        for number, tensors in enumerate(contents):
            if not tensors:
                continue
            file = f"model-{rank * files + number:06d}-of-{ranks * files:06d}.safetensors"
            save_file(tensors, folder / file)
            file_index[file] = len(file_index)
            block_index |= dict.fromkeys(tensors, file_index[file])
    (folder / "tensorkey.json").write_text(json.dumps(names, indent=4))
    (folder / "index").write_text(json.dumps({"file_index": file_index, "block_index": block_index}))
    if dense is not None:
        torch.save(dense, folder / "model.pt")
    if extra is not None:
        torch.save(extra, folder / "extra.pt")
    return folder


def pack_entry(key, vector, state):
    """HashMapEmbeddingEntry: the floats, the dim, the sign."""
    floats = [*vector, *state]
    return (
        struct.pack("<I", len(floats))
        + struct.pack(f"<{len(floats)}f", *floats)
        + struct.pack("<QQ", len(vector), key)
    )


def pack_list(entries, free_after=(), count=None):
    """ArrayLinkedList: `free_after` are the positions after which there is a free node, too."""
    nodes = []
    for position, entry in enumerate(entries):
        nodes.append(struct.pack("<IIB", position + 2, position, 1) + entry)
        nodes += [struct.pack("<IIB", 7, 0, 0)] * list(free_after).count(position)
    count = len(entries) if count is None else count
    return struct.pack("<QIIIII", count, 1, len(entries), 0, len(nodes), len(nodes)) + b"".join(nodes)


def mark_done(folder, servers, shards):
    """The file that is written when all is saved."""
    moment = {"secs_since_epoch": 1638316800, "nanos_since_epoch": 5}
    content = {"num_shards": servers, "num_internal_shards": shards, "datetime": moment}
    (folder / "embedding_dump_done").write_text("---\n" + yaml.safe_dump(content, sort_keys=False) + "\n")


def write_persia(folder, rows, *, servers=1, shards=1, free_after=(), dense=None):
    """rows: [(sign, vector, state)]; a sign is on server `sign % servers`, in file `sign // 7 % shards`."""
    folder.mkdir(parents=True)
    for server in range(servers):
        place = folder / f"s{server}"
        place.mkdir()
        for shard in range(shards):
            mine = [
                pack_entry(*row)
                for row in rows
                if row[0] % servers == server and row[0] // 7 % shards == shard
            ]
            (place / f"replica_{server}_shard_{shard}.emb").write_bytes(pack_list(mine, free_after))
        mark_done(place, servers, shards)
    mark_done(folder, servers, shards)
    if dense is not None:
        torch.save(dense, folder / "dense.pt")
    return folder


def sign_of(key, group, bits=8):
    """PERSIA's sign of an id in a group, which is counted from 0."""
    return key % (2 ** (64 - bits) - 1) + ((group + 1) << (64 - bits))
