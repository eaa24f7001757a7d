// What openapi.json says, for people. Text becomes text, never markup.

const described = await (await fetch("openapi.json")).json();

function element(tag, ...children) {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
}

function resolved(schema) {
  const name = schema?.$ref?.split("/").pop();
  return name ? described.components.schemas[name] : schema ?? {};
}

function kind(schema) {
  if (schema.anyOf) return schema.anyOf.map(kind).join(" or ");
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.type === "array") return `list of ${kind(schema.items ?? {})}`;
  return schema.format === "binary" ? "file" : schema.type ?? "anything";
}

function table(title, fields) {
  const rows = fields.map(([name, schema, words]) =>
    element("tr", element("th", name), element("td", kind(schema)), element("td", words ?? schema.description ?? "")));
  return rows.length ? [element("h3", title), element("table", element("tbody", ...rows))] : [];
}

function properties(title, schema) {
  return table(title, Object.entries(resolved(schema).properties ?? {}));
}

function operation(method, path, about) {
  const parameters = (about.parameters ?? []).map((one) => [one.name, one.schema, one.description]);
  const bodies = Object.entries(about.requestBody?.content ?? {});
  const answer = about.responses?.["200"]?.content?.["application/json"]?.schema;
  return element(
    "section",
    element("h2", `${method.toUpperCase()} ${path}`),
    element("p", about.summary ?? ""),
    element("p", about.description ?? ""),
    ...table("In the query", parameters),
    ...bodies.flatMap(([type, { schema }]) => properties(`In the body, ${type}`, schema)),
    ...properties("Answer", answer),
  );
}

const paths = Object.entries(described.paths).flatMap(([path, methods]) =>
  Object.entries(methods).map(([method, about]) => operation(method, path, about)));
const types = Object.entries(described.components?.schemas ?? {});
document.getElementById("operations").append(
  ...paths, element("h2", "Types"), ...types.flatMap(([name, schema]) => properties(name, schema)));
