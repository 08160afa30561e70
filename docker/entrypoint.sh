#!/bin/sh
# The image's command: a path that ends in .py is run by python, anything else as it stands.
# exec: no shell stays between tini and the command, which gets SIGTERM itself.
set -eu
case "${1-}" in
*.py) exec python "$@" ;;
*) exec "$@" ;;
esac
