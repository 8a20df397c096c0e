"""Small video files for tests."""

import av
import numpy as np


def video_file(path, *, count=10, size=(64, 48), rate=10, codec="mpeg4", gop=5, cut=0):
    """A video whose frame i is grey of level 10·i (mod 250), without the `cut` first packets."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.gop_size = gop
        packets = []
        for number in range(count):
            level = 10 * number % 250
            image = np.full((size[1], size[0], 3), level, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")):
                packets.append(packet)
        for packet in [*packets, *stream.encode()][cut:]:
            container.mux(packet)
    return path
