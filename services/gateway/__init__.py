"""The gateway: transactions for other languages, and the way in for clients outside the network.

- `gateway_handler.py` serves `GatewayService`. `requests.py` checks what callers send, and
  `commits.py` runs each commit to its end, whether or not its caller still waits.
- `cluster_handler.py` serves `ClusterService`: it tells clients to send everything through here.
- `server_routes.py` decides which calls are forwarded, and to which server; `forwarded_call.py`
  forwards one call unread. `servers.py` knows the servers of the cluster.

A gateway keeps nothing that a promise rests on: the same commit has the same outcome at every
gateway, and the cells decide it.
"""
