// The memory calculator: looks up what `packs plan` says (calculator_data.js).
document.addEventListener("DOMContentLoaded", () => {
  const form = document.getElementById("calculator");
  if (!form) return;
  const choices = { model: Object.keys(PEAKS), ...OFFERED };
  const first = { model: "Qwen3-4B", batch: 4, tokens: 2048, rank: 16, recompute: "block" };

  for (const [name, values] of Object.entries(choices)) {
    for (const value of values) {
      const chosen = value === first[name];
      form.elements[name].add(new Option(value.toLocaleString("en"), value, chosen, chosen));
    }
  }

  const show = () => {
    let place = 0;
    for (const [name, values] of Object.entries(OFFERED)) {
      place = place * values.length + form.elements[name].selectedIndex;
    }
    const peak = PEAKS[form.elements.model.value][place];
    const mac = Object.entries(MACS).find(([, usable]) => peak <= usable);
    form.elements.peak.value = `${Number((peak / 1000).toPrecision(2))} GB`;
    form.elements.mac.value = mac ? `${mac[0]} GB` : "more than 128 GB";
  };
  form.addEventListener("change", show);
  show();
});
