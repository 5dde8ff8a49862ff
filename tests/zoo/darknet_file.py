"""The smallest detector that a Darknet file describes: one convolution and a head for two classes."""

CFG = """[net]
width=16
height=16
channels=3
[convolutional]
filters=7
size=1
activation=linear
[yolo]
mask=0
anchors=8,8
classes=2
num=1
"""
