#!/bin/sh
# Run the container's command: python runs a path that ends in .py, anything else runs unchanged.
# exec leaves no shell between tini and the command. The command receives SIGTERM directly.
set -eu
case "${1-}" in
*.py) exec python "$@" ;;
*) exec "$@" ;;
esac
