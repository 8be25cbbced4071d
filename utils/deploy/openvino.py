"""Writing of OpenVINO networks: a folder with .xml, .bin and a description, converted from ONNX in memory."""

from __future__ import annotations

from pathlib import Path

from utils.deploy.description import ExportDescription
from utils.files import write_error, write_yaml
from utils.log import first_line


def write_openvino(onnx_file: Path, folder: Path, stem: str, description: ExportDescription) -> None:
    """Convert ``onnx_file`` and write STEM.xml, STEM.bin and STEM.yaml into ``folder``.

    Raises:
        ImportError: the openvino package is missing.
        ValueError: OpenVINO cannot read the graph.
        OSError: the files could not be written.
    """
    try:
        import openvino
    except ImportError as error:
        raise ImportError("writing OpenVINO needs a package: pip install openvino") from error
    try:
        model = openvino.Core().read_model(str(onnx_file))
    except RuntimeError as error:
        raise ValueError(f"OpenVINO cannot convert the graph: {first_line(error)}") from error
    try:
        openvino.save_model(model, str(folder / f"{stem}.xml"), compress_to_fp16=description.half)
    except RuntimeError as error:
        raise write_error(folder, error) from error
    write_yaml(folder / f"{stem}.yaml", description.plain())
