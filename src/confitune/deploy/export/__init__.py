"""Tasks of a network or a bundle as files for other runtimes: one module a format."""

from confitune.deploy.export.export import (
    check_export as check_export,
    export_bundle as export_bundle,
    export_network as export_network,
)
