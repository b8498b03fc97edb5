package disk

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// attachLoop puts the image on a free loop device, which lets go of it by
// itself when the last user (the mount) goes away. The caller closes the
// device after it has mounted it.
func attachLoop(image string) (*os.File, error) {
	file, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil, unsupported("no loop devices")
	}
	if err != nil {
		return nil, err
	}
	defer control.Close()
	for range 64 { // another program may take the free one first
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("free loop device: %w", err)
		}
		dev, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
		if err != nil {
			return nil, err
		}
		err = configureLoop(dev, file)
		if err == nil {
			return dev, nil
		}
		_ = dev.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("loop device for %s: %w", image, err)
		}
	}
	return nil, unsupported("no free loop device")
}

// configureLoop asks for direct I/O, so that data is cached once and not also
// as pages of the image, which no sandbox pays for; and does without where the
// image's file system has none.
func configureLoop(dev, file *os.File) error {
	config := unix.LoopConfig{
		Fd:   uint32(file.Fd()),
		Size: 4096,
		Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO},
	}
	copy(config.Info.File_name[:], "dsec")
	err := unix.IoctlLoopConfigure(int(dev.Fd()), &config)
	if errors.Is(err, unix.EINVAL) {
		config.Info.Flags &^= unix.LO_FLAGS_DIRECT_IO
		config.Size = 0
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &config)
	}
	return err
}

// ioctl is for requests that x/sys has no function for. arg is a struct.
func ioctl[T any](fd int, request uint, arg *T) error {
	_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(unsafe.Pointer(arg)))
	runtime.KeepAlive(arg)
	if e != 0 {
		return e
	}
	return nil
}
