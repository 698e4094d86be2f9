"""The gateway: transactions for other languages, and the way in for clients outside the network.

- `gateway_handler.py` serves `GatewayService`. `commits.py` checks what callers send, and runs each
  commit to its end, whether or not its caller still waits.
- `row_store_handler.py` serves `RowStoreService` where a row store has the cells.
- `forwarded_call.py` decides which calls are forwarded, and forwards each unread. `servers.py`
  knows the servers of the cluster, and tells clients to send everything through here.

A gateway keeps nothing that a promise rests on: the same commit has the same outcome at every
gateway, and the cells decide it.
"""
