"""One of several gateway processes: `python -m gateway_svc.child INDEX ADDRESSES START [SETTINGS ...]`.

Started by gateway_svc.process.processes only. START counts the starts of this process, from 0. SETTINGS are the
arguments of quire-gateway. ADDRESSES are the shared ports, separated by a comma: gRPC, and HTTP if it is on.
"""

from __future__ import annotations

import sys

from gateway_svc.flags import make_parser
from gateway_svc.process.processes import EXIT_CANNOT_START, port_of_child
from gateway_svc.process.readiness import link_to_parent
from gateway_svc.service import run_gateway
from svc_common import config

READY_WITHIN_S = 5.0


def main() -> None:
    """Parse the arguments of quire-gateway, then replace its addresses by those of this process."""
    index, addresses, start = int(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])
    args = config.parse(make_parser(), sys.argv[4:])
    args.listen, args.http_listen = addresses[0], addresses[1] if len(addresses) > 1 else config.OFF
    args.metrics_listen = port_of_child(args.metrics_listen, index)
    args.health_listen = port_of_child(args.health_listen, index)
    args.admin_listen = port_of_child(args.admin_listen, index)
    args.console_listen = port_of_child(args.console_listen, index)
    # After a restart, other processes are serving already: accept connections only when this process is ready as well.
    try:
        run_gateway(args, link=link_to_parent(), ready_within_s=READY_WITHIN_S if start else 0.0)
    except SystemExit as end:
        if not isinstance(end.code, str):
            raise
        print(end.code, file=sys.stderr)
        sys.exit(EXIT_CANNOT_START)


if __name__ == "__main__":
    main()
