// Returns the texts whose contrast with their background is below 4.5 : 1, in the whole page or in arguments[0].
const parse = (colour) => {
  const [r, g, b, a = 1] = colour.match(/[\d.]+/g).map(Number);
  return { r, g, b, a };
};
const over = (top, under) => {
  const mix = (key) => top[key] * top.a + under[key] * (1 - top.a);
  return { r: mix("r"), g: mix("g"), b: mix("b"), a: 1 };
};
const luminance = ({ r, g, b }) => {
  const [x, y, z] = [r, g, b].map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const ratio = (one, two) => {
  const [low, high] = [luminance(one), luminance(two)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
const html = getComputedStyle(document.documentElement).backgroundColor;
const behind = (element) => {
  const layers = [];
  for (let each = element; each; each = each.parentElement) {
    layers.push(parse(getComputedStyle(each).backgroundColor));
  }
  const canvas = { r: 255, g: 255, b: 255, a: 1 };
  return layers.reverse().reduce((under, top) => over(top, under), parse(html).a ? parse(html) : canvas);
};
// In a drawing, what is behind a text is the last shape before it that has its place.
const drawn = (text) => {
  const { left, top, height } = text.getBoundingClientRect();
  const shapes = [...text.ownerSVGElement.querySelectorAll("rect:not(defs *)")].filter((shape) => {
    const box = shape.getBoundingClientRect();
    const here = box.left <= left + 1 && left + 1 <= box.right;
    const first = shape.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING;
    return here && first && box.top <= top + height / 2 && top + height / 2 <= box.bottom;
  });
  const fill = shapes.length ? getComputedStyle(shapes.at(-1)).fill : "none";
  if (fill.startsWith("url")) return parse(getComputedStyle(text).stroke);
  return fill === "none" ? behind(text.ownerSVGElement) : over(parse(fill), behind(text.ownerSVGElement));
};
const found = [];
const walker = document.createTreeWalker(document.querySelector(arguments[0] ?? "body"), NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode;
  const element = node.parentElement;
  if (!node.data.trim() || element.closest("script, style, noscript, title, option")) continue;
  if (!element.checkVisibility() || element.closest(".visually-hidden, .skip")) continue;
  const svg = element.closest("svg text");
  const style = getComputedStyle(element);
  const colour = parse(svg ? style.fill : style.color);
  const back = svg ? drawn(svg) : behind(element);
  const found_ratio = ratio(over(colour, back), back);
  if (found_ratio < 4.5) found.push(`${node.data.trim().slice(0, 40)}: ${found_ratio.toFixed(2)}`);
}
return found;
