export function docsPage(_: { version: string }): string {
  return "";
}
