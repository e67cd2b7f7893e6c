"""From arrays of any framework to a launch: forms, devices, tensor maps, parameter blocks, and the interpreter's launches."""
