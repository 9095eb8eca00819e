export * from "./base-image.ts";
export * from "./apt.ts";
export * from "./cpio.ts";
export * from "./initramfs.ts";
export * from "./kernel.ts";
export * from "./rootfs.ts";
