"""What exports and serving add to Boltcutter."""

from boltcutter.extend import Command, Part, Section

PART = Part(
    name="boltcutter_export",
    commands={
        "export": Command(
            "boltcutter_export.command:main",
            """Export a model: boltcutter export run=<folder> export=<formats> [ckpt=best|last|path] [key=value …]

boltcutter export run=runs/… export=onnx
boltcutter export run=runs/… export=[torch,int8,int4] export.max_drop=1    # several, which may lose one point""",
        ),
        "serve": Command(
            "boltcutter_export.serving.server:main",
            """Serve predictions over HTTP: boltcutter serve run=<folder> [ckpt=best|last|path] [export=format or file]

boltcutter serve run=runs/… port=8000 workers=2
boltcutter serve run=runs/… host=0.0.0.0 token_file=token      # reachable from other machines
    limits: max_batch= max_wait= max_waiting= max_samples= max_bytes= max_total_bytes= max_tokens= max_streams=
        timeout= drain=, in seconds""",
            begin="boltcutter_export.serving.batching:begin",
        ),
    },
    groups=("export",),
    names={"load_exported": "boltcutter_export.exported"},
    components=("boltcutter_export.qat",),
    section=Section("Exports", "export/export.json", "boltcutter_export.report_section:render"),
    offers={"predictor": "boltcutter_export.exported:ExportedModel"},
)
