"""A store of S3's protocol in a process, and a machine's view of it: a cache folder and the URL of a run."""

from contextlib import contextmanager

from cloud import serving
from cloud_s3 import control
from pyarrow import fs

KEYS = {
    "AWS_ACCESS_KEY_ID": "somebody",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class ObjectStore:
    """A server with the bucket `bucket`."""

    def __init__(self, address):
        self.address = address
        self.options = f"?region=here&scheme=http&endpoint_override={address}"

    def url(self, name):
        return f"s3://bucket/{name}{self.options}"

    def fail(self, **fault):
        """Make requests fail; see `cloud_s3.py`."""
        control(self.address, **fault)

    def heal(self):
        control(self.address, count=0)

    @property
    def system(self):
        return fs.FileSystem.from_uri(self.url("x"))[0]

    def names(self, run):
        """The names of all objects of a run."""
        infos = self.system.get_file_info(
            fs.FileSelector(f"bucket/{run}", recursive=True, allow_not_found=True)
        )
        files = [info.path.removeprefix(f"bucket/{run}/") for info in infos if info.type == fs.FileType.File]
        return sorted(files)

    def read(self, name):
        with self.system.open_input_stream(f"bucket/{name}") as file:
            return file.read()

    def write(self, name, content):
        with self.system.open_output_stream(f"bucket/{name}") as file:
            file.write(content)

    def delete(self, name):
        self.system.delete_file(f"bucket/{name}")


@contextmanager
def object_store(folder):
    """A server; its objects are in its memory."""
    (folder / "bucket").mkdir(parents=True)
    with serving("s3", folder) as address:
        yield ObjectStore(address)
