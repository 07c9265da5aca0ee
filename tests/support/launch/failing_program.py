"""A trainer that ends as FOLDER/INDEX.json orders: after a file is there, with a code, and with a last line.

`python failing_program.py FOLDER`; an order is {"code": 1, "line": "error: …", "after": "file"}, and each
process takes the first order that is left.
"""

import json
import os
import sys
import time

folder, index = sys.argv[1], os.environ["KARVAN_INDEX"]
role = os.environ["KARVAN_ROLE"]
path = f"{folder}/{role}-{index}.json"
with open(f"{folder}/started", "a") as started:
    started.write(f"{role}-{index}\n")
while not os.path.exists(path):
    time.sleep(0.01)
with open(path) as file:
    orders = json.load(file)
order = orders[0]
if len(orders) > 1:  # the last one is for all that follow
    with open(f"{path}.new", "w") as file:
        json.dump(orders[1:], file)
    os.rename(f"{path}.new", path)
while order.get("after") and not os.path.exists(f"{folder}/{order['after']}"):
    time.sleep(0.01)
time.sleep(order.get("seconds", 0))
if order.get("line"):
    print(order["line"], flush=True)
sys.exit(order["code"])
